"""A quantized weight, whatever format it comes in, and how its rows become blocks of octavo's own types.

A format (gptq.py, awq.py, …) says where the numbers are; the layout of blocks, and what becomes of a weight that does
not fit into it, is here alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from octavo.checkpoints.dequantize_groups import (
    FLOAT_HEADER_BYTES,
    GROUP_STEP,
    INTEGER_HEADER_BYTES,
    e4m3_values,
)
from octavo.checkpoints.quantization.parts import Arrays, Parts, StoredTensor
from octavo.checkpoints.tensor_types import readable_type

__all__ = ["QuantizedWeight"]

Codes = npt.NDArray[np.uint8]
# The module's tensors, first row, row after the last → a row of numbers for each.
ReadCodes = Callable[[Arrays, int, int], Codes]
ReadScales = Callable[[Arrays, int, int], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class QuantizedWeight:
    """Attributes:

    kind: ``"U4"``, ``"U8"`` (unsigned integers with a zero) or ``"F8_E4M3"``.
    shape: [out, in].
    group_size: inputs that share a scale; the last group of a row may be shorter.
    parts: the tensors that it is read from.
    main: suffix of the one with the numbers.
    codes: [rows, in] bytes, or [rows, in / 2] of U4: two a byte, the first one the low half. May be longer than the
        row is.
    scales: [rows, groups].
    zeros: [rows, groups]; None: 8 for U4 and 128 for U8, the middle.
    input_groups: the group of each input, where a group's inputs are not neighbours (act-order); None: they are.
    """

    kind: str
    shape: tuple[int, int]
    group_size: int
    parts: Parts
    main: str
    codes: ReadCodes
    scales: ReadScales
    zeros: ReadCodes | None = None
    input_groups: npt.NDArray[np.int64] | None = None

    @property
    def stored(self) -> list[StoredTensor]:
        return list(self.parts.stored.values())

    @property
    def num_bytes(self) -> int:
        """In the files."""
        return sum(part.entry.num_bytes for part in self.stored)

    @cached_property
    def input_order(self) -> npt.NDArray[np.int32] | None:
        """The inputs group by group, [in]: what the columns of `rows` are, where they are not as the checkpoint has
        them. None: they are."""
        return None if self.block_size is None else self._by_group

    @cached_property
    def _by_group(self) -> npt.NDArray[np.int32] | None:
        return None if self.input_groups is None else np.argsort(self.input_groups, kind="stable").astype(np.int32)

    @cached_property
    def _has_whole_groups(self) -> bool:
        """Whether each group has as many inputs as it should."""
        if self.input_groups is None:
            return True
        return np.array_equal(self.input_groups[self._by_group], np.arange(self.shape[1]) // self.group_size)

    @cached_property
    def block_size(self) -> int | None:
        """Inputs of a block: as many as a group has, or a divisor of that where the row is not whole groups. None:
        rows cannot be cut into blocks."""
        size = math.gcd(self.group_size, self.shape[1])
        return size if self._has_whole_groups and size % GROUP_STEP == 0 else None

    @property
    def type(self) -> str:
        """Storage type of what `rows` gives: blocks, or F32 where there are none."""
        return "F32" if self.block_size is None else f"{self.kind}:{self.block_size}"

    @property
    def why_widened(self) -> str:
        """Of type F32: why it is not kept as it is."""
        if not self._has_whole_groups:
            return f"groups of inputs (desc_act, act-order) that are not of {self.group_size} each"
        return f"rows that are not whole groups of a multiple of {GROUP_STEP} inputs"

    def rows(self, arrays: Arrays, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Bytes of the rows from ``first`` to before ``last``, 1-D, of type ``type``, whose columns are
        in ``input_order``."""
        if self.block_size is None:
            return self._widened(arrays, first, last).view(np.uint8).reshape(-1)
        num_rows, num_blocks = last - first, self.shape[1] // self.block_size
        entry = readable_type(self.type)
        blocks = np.empty((num_rows, num_blocks, entry.block_bytes), np.uint8)
        group_of_block = np.arange(num_blocks) * self.block_size // self.group_size
        scales = np.ascontiguousarray(self.scales(arrays, first, last)[:, group_of_block], "<f4")
        blocks[..., :FLOAT_HEADER_BYTES] = scales.view(np.uint8).reshape(num_rows, num_blocks, 4)
        header = FLOAT_HEADER_BYTES
        if self.kind != "F8_E4M3":
            header = INTEGER_HEADER_BYTES
            blocks[..., FLOAT_HEADER_BYTES:header] = 0
            blocks[..., FLOAT_HEADER_BYTES] = self._zeros(arrays, first, last)[:, group_of_block]
        blocks[..., header:] = self._ordered_codes(arrays, first, last).reshape(num_rows, num_blocks, -1)
        return blocks.reshape(-1)

    def _ordered_codes(self, arrays: Arrays, first: int, last: int) -> Codes:
        codes, order = self.codes(arrays, first, last), self.input_order
        if order is None:
            return codes
        if self.kind != "U4":
            return codes[:, order]
        numbers = np.empty((last - first, 2 * codes.shape[1]), np.uint8)
        numbers[:, 0::2], numbers[:, 1::2] = codes & 15, codes >> 4
        codes = numbers[:, order]
        return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)

    def _zeros(self, arrays: Arrays, first: int, last: int) -> Codes:
        if self.zeros is not None:
            return self.zeros(arrays, first, last)
        num_groups = -(-self.shape[1] // self.group_size)
        return np.full((last - first, num_groups), 8 if self.kind == "U4" else 128, np.uint8)

    def _widened(self, arrays: Arrays, first: int, last: int) -> npt.NDArray[np.float32]:
        in_size = self.shape[1]
        group = np.arange(in_size) // self.group_size if self.input_groups is None else self.input_groups
        codes = self.codes(arrays, first, last)
        if self.kind == "F8_E4M3":
            values = e4m3_values(codes[:, :in_size])
        else:
            values = np.empty((last - first, in_size), np.float32)
            if self.kind == "U4":
                values[:, 0::2] = (codes & 15)[:, : (in_size + 1) // 2]
                values[:, 1::2] = (codes >> 4)[:, : in_size // 2]
            else:
                values[:] = codes[:, :in_size]
            values -= self._zeros(arrays, first, last)[:, group]
        with np.errstate(all="ignore"):  # a damaged scale may be infinite
            values *= self.scales(arrays, first, last)[:, group]
        return values
