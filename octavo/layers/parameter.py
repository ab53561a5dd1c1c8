"""A parameter that loads itself: it knows which rows each shard of a merged weight fills, and what is still missing.

The loader only finds the parameter; shapes are checked and types converted here, one tensor at a time, so that no
second copy of the model ever exists. Memory is taken when the first shard arrives and has the right shape.
"""

import math
from dataclasses import dataclass, field
from itertools import groupby
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.checkpoints import readable_type
from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from octavo.checkpoints import CheckpointTensor

__all__ = ["ShardId", "WeightParameter"]

# "q", "k", "v" of a QKV weight, 0 and 1 of a gate-up weight, None for a weight that comes whole.
ShardId = str | int | None

# Types whose bytes torch reads as they are; all others are dequantized to float32 first.
_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Of what is dequantized at a time, so that the numbers are still in a core's cache when they are packed.
_PIECE_BYTES = 1 << 15
# Of what is quantized at a time: what is made on the way stays small.
_QUANTIZED_BYTES = 1 << 18


@dataclass
class _Part:
    """Rows from ``start`` to ``stop`` of a parameter, kept as numbers of its type or of a quantized one, whose columns
    may be in an order of their own (int32; empty: they are not)."""

    start: int
    stop: int
    kept_as: str
    input_order: bytes = b""
    weight: "kernels.Weight" = field(default_factory=lambda: torch.empty(0))
    missing: int = 0  # rows

    def keeps(self, source: "CheckpointTensor") -> bool:
        """Whether it has the same bytes."""
        return self.kept_as == source.type and self.input_order == _bytes_of(source.input_order)

    def empty_weight(self, in_size: int, dtype: torch.dtype, gated: bool) -> "kernels.Weight":
        order = torch.frombuffer(bytearray(self.input_order), dtype=torch.int32) if self.input_order else None
        return kernels.empty_weight((self.stop - self.start, in_size), dtype, gated, self.kept_as, order)

    def num_bytes(self, row_shape: tuple[int, ...], itemsize: int) -> int:
        values = math.prod(row_shape)
        if not self.kept_as:
            return (self.stop - self.start) * values * itemsize
        return (self.stop - self.start) * _stored_bytes(self.kept_as, values)


def _stored_bytes(type_name: str, values: int) -> int:
    """Bytes of a row of so many values, in whole blocks."""
    kind = readable_type(type_name)
    return -(-values // kind.block_size) * kind.block_bytes


def _bytes_of(order: npt.NDArray[np.int32] | None) -> bytes:
    return b"" if order is None else order.tobytes()


def _in_order(values: Tensor, order: npt.NDArray[np.int32]) -> Tensor:
    found = torch.empty_like(values)
    found[:, torch.from_numpy(order)] = values
    return found


def _numbers(source: "CheckpointTensor") -> Tensor:
    """Of a plain type, as they lie in the file."""
    return torch.from_numpy(source.data).view(_PLAIN_TYPES[source.type]).view(source.shape)


class WeightParameter(nn.Parameter):
    """Args:

    full_shape: of the whole parameter; until a shard is loaded, the tensor itself is empty.
    dtype: what the checkpoint's type is converted to.
    shards: shard id → rows (dim 0), in order; None: the parameter comes whole.
    offset: added to what the checkpoint says, in the parameter's type.
    matrix: a product or an embedding reads it, and it is kept as the chosen kernels want it, see ``packed``.
    gated: that product is ``kernels.gated_linear``.
    vocabulary: a matrix of a row for each token, which stays wide when others are quantized.

    Attributes:
        packed: a weight matrix in the form that the chosen kernels read it in, once it is loaded. Where that is another
            form, the parameter itself stays empty.
        widened: quantized type that is not kept as it is → (bytes in the checkpoint, bytes here).
        quantized: plain type that was quantized → likewise.
    """

    full_shape: tuple[int, ...]
    offset: float
    shards: dict[ShardId, slice]
    loaded_shards: set[ShardId]
    packed: "kernels.Weight"
    widened: dict[str, tuple[int, int]]
    quantized: dict[str, tuple[int, int]]
    is_vocabulary: bool
    _expected: dict[ShardId, tuple[str, bytes]]
    _target: str
    _parts: list[_Part]
    _lock: Lock
    _matrix: bool
    _gated: bool

    def __new__(
        cls,
        full_shape: tuple[int, ...],
        dtype: torch.dtype,
        shards: dict[ShardId, int] | None = None,
        *,
        offset: float = 0.0,
        matrix: bool = False,
        gated: bool = False,
        vocabulary: bool = False,
    ) -> Any:
        return super().__new__(cls, torch.empty(0, dtype=dtype), requires_grad=False)

    def __init__(
        self,
        full_shape: tuple[int, ...],
        dtype: torch.dtype,
        shards: dict[ShardId, int] | None = None,
        *,
        offset: float = 0.0,
        matrix: bool = False,
        gated: bool = False,
        vocabulary: bool = False,
    ) -> None:
        super().__init__()
        self.offset = offset
        self.packed = self
        self._matrix, self._gated, self.is_vocabulary = matrix, gated, vocabulary
        self.full_shape = full_shape
        self.loaded_shards = set()
        self.widened = {}
        self.quantized = {}
        self._expected = {}
        self._target = ""
        self._parts = []
        self._lock = Lock()
        self.shards = {}
        start = 0
        for shard_id, rows in (shards or {None: full_shape[0]}).items():
            self.shards[shard_id] = slice(start, start + rows)
            start += rows

    def expect(self, shard_id: ShardId, type_name: str, input_order: npt.NDArray[np.int32] | None = None) -> None:
        """Says, before anything is loaded, in which type the checkpoint has a shard, and its columns in which order. A
        weight matrix keeps the types that the chosen kernels compute with; what is not expected is kept as numbers of
        the parameter's type."""
        for each in self.shards if shard_id is None else (shard_id,):
            self._expected[each] = type_name, _bytes_of(input_order)

    def quantize_to(self, type_name: str) -> None:
        """Says, before anything is loaded, that what the checkpoint has as plain numbers is to be kept as this type,
        which the chosen kernels keep; of a weight matrix that is no vocabulary's."""
        if self._matrix and not self.is_vocabulary:
            self._target = type_name

    @property
    def full_nbytes(self) -> int:
        """Bytes that the parameter takes; padding and orders of columns are not counted."""
        return sum(part.num_bytes(self.full_shape[1:], self.itemsize) for part in self._plan())

    @property
    def kept_as(self) -> list[str]:
        """Quantized types of a matrix, part by part, empty for numbers of the parameter's own."""
        return [part.kept_as for part in self._plan()] if self._matrix else []

    def share_nbytes(self, num_rows: int, first_row: int) -> int:
        """Bytes of some rows, as part of ``full_nbytes``."""
        part = self._part_of(first_row) or _Part(0, 0, "")
        return _Part(0, num_rows, part.kept_as).num_bytes(self.full_shape[1:], self.itemsize)

    def _plan(self) -> list[_Part]:
        """The rows in order, cut where they are kept in another type, or their columns in another order."""
        kept = {shard_id: self._kept(*self._expected.get(shard_id, ("", b""))) for shard_id in self.shards}
        if self._gated and len(set(kept.values())) > 1:
            kept = dict.fromkeys(kept, ("", b""))  # gates lie beside what they belong to
        parts = []
        for form, same in groupby(self.shards, key=lambda shard_id: kept[shard_id]):
            rows = [self.shards[shard_id] for shard_id in same]
            parts.append(_Part(rows[0].start, rows[-1].stop, *form))
        return parts

    def _kept(self, type_name: str, input_order: bytes) -> tuple[str, bytes]:
        if type_name in _PLAIN_TYPES:
            return self._target, b""
        return (type_name, input_order) if self._matrix and type_name and kernels.keeps(type_name) else ("", b"")

    def shard_rows(self, shard_id: ShardId) -> slice:
        """Rows that the shard fills; None: all."""
        return self.shards[shard_id] if shard_id is not None else slice(0, self.full_shape[0])

    def weight_loader(self, source: "CheckpointTensor", shard_id: ShardId = None) -> None:
        """Fills the shard's rows; None fills the whole parameter, merged or not.

        Raises:
            CheckpointError: the shard is of another shape, or has been filled before.
        """
        self.fill(source, self.claim(source, shard_id))

    def claim(self, source: "CheckpointTensor", shard_id: ShardId = None) -> int:
        """Takes memory for a shard that is about to be filled, and notes that it has arrived. Returns its first row;
        raises as ``weight_loader``."""
        rows = self.shard_rows(shard_id)
        expected = (rows.stop - rows.start, *self.full_shape[1:])
        if tuple(source.shape) != expected:
            raise CheckpointError(
                f"has shape {list(source.shape)}, expected {list(expected)}", file=source.file, tensor=source.name
            )
        arrived = set(self.shards) if shard_id is None else {shard_id}
        if arrived & self.loaded_shards:
            raise CheckpointError("is there twice", file=source.file, tensor=source.name)
        if not self.loaded_shards:
            self._take_memory()
        self.loaded_shards |= arrived
        self._note_conversion(source, int(rows.start))
        return int(rows.start)

    def _note_conversion(self, source: "CheckpointTensor", first_row: int) -> None:
        part = self._part_of(first_row)
        if part is None or part.keeps(source) or (source.type in _PLAIN_TYPES and not part.kept_as):
            return
        noted = self.quantized if part.kept_as else self.widened
        stored, here = noted.get(source.type, (0, 0))
        rows, values = source.shape
        stored += rows * _stored_bytes(source.type, values)
        noted[source.type] = stored, here + self.share_nbytes(rows, first_row)

    def _take_memory(self) -> None:
        if not self._matrix:
            self.data = torch.empty(self.full_shape, dtype=self.dtype)
            return
        self._parts = self._plan()
        for part in self._parts:
            part.missing = part.stop - part.start
            part.weight = part.empty_weight(self.full_shape[1], self.dtype, self._gated)
        self._show_weights()

    def _show_weights(self) -> None:
        weights = [part.weight for part in self._parts]
        if len(weights) == 1 and isinstance(weights[0], Tensor):
            self.data = weights[0]
        elif len(weights) == 1:
            self.packed = weights[0]
        else:
            packed = [weight for weight in weights if isinstance(weight, kernels.PackedWeight)]
            self.packed = kernels.MergedWeight(tuple(packed))

    def fill(self, source: "CheckpointTensor", first_row: int) -> None:
        """Rows that were claimed; ``source`` may be a part of them, and others be filled meanwhile."""
        part = self._part_of(first_row)
        self._fill(source, first_row, part)
        if part is None:
            return
        with self._lock:
            part.missing -= source.shape[0]
            if part.missing:
                return
        part.weight = kernels.filled(part.weight)
        with self._lock:
            self._show_weights()

    def widen_in_products(self) -> None:
        """Quantized parts, whose rows are all there, become bfloat16 while they are multiplied, where kernels can."""
        if self._parts:
            for part in self._parts:
                part.weight = kernels.widened_in_products(part.weight)
            self._show_weights()

    def _fill(self, source: "CheckpointTensor", first_row: int, part: _Part | None) -> None:
        if source.type in _PLAIN_TYPES:
            if part is not None and part.kept_as:
                self._quantize(source, first_row, part)
            else:
                self._put(first_row, _numbers(source))
            return
        if part is not None and part.keeps(source):
            kernels.fill_blocks(part.weight, first_row - part.start, source.data)
            return
        for row, piece in source.row_pieces(_PIECE_BYTES):
            values = kernels.dequantize(piece.type, piece.data).view(piece.shape)
            self._put(first_row + row, values if piece.input_order is None else _in_order(values, piece.input_order))

    def _quantize(self, source: "CheckpointTensor", first_row: int, part: _Part) -> None:
        for row, piece in source.row_pieces(_QUANTIZED_BYTES):
            try:
                blocks = kernels.quantize(part.kept_as, _numbers(piece))
            except ValueError as error:
                raise CheckpointError(f"cannot be quantized: {error}", file=source.file, tensor=source.name) from None
            kernels.fill_blocks(part.weight, first_row + row - part.start, blocks)

    def _part_of(self, row: int) -> _Part | None:
        return next((part for part in self._parts if part.start <= row < part.stop), None)

    def _put(self, first_row: int, rows: Tensor) -> None:
        part = self._part_of(first_row)
        if part is not None:
            kernels.fill_rows(part.weight, first_row - part.start, rows)
            return
        filled = self.data[first_row : first_row + len(rows)]
        filled.copy_(rows)
        if self.offset:
            filled += self.offset
