"""The tensors of a checkpoint, one after another, as bytes on the mapped file."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoints.checkpoint import PlacedTensor, open_checkpoint
from octavo.checkpoints.quantization import QuantizedWeight
from octavo.checkpoints.tensor_entry import map_file
from octavo.checkpoints.tensor_types import readable_type, to_float32
from octavo.errors import CheckpointError
from octavo.logging import init_logger

__all__ = ["CheckpointTensor", "CheckpointTensors", "iterate_tensors"]

logger = init_logger(__name__)

Bytes = npt.NDArray[np.uint8]
# Of a tensor whose bytes have to be made, as much is made in one go.
_MADE_BYTES = 8 * 2**20
_MADE = "_made"


@dataclass(frozen=True)
class CheckpointTensor:
    """Attributes:

    name: its Hugging Face name.
    type: storage type, one of those that octavo reads (tensor_types.py).
    shape: torch order.
    source: its bytes, or, where those have to be made first, what makes those of the rows from one number to before
        another.
    file: path of the file that it is in.
    input_order: of a quantized matrix whose blocks have its columns in another order: the column that each one in them
        is, [columns].
    """

    name: str
    type: str
    shape: tuple[int, ...]
    source: Bytes | Callable[[int, int], Bytes]
    file: str
    input_order: npt.NDArray[np.int32] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether values share a scale."""
        return readable_type(self.type).block_size > 1

    @property
    def data(self) -> Bytes:
        """Its bytes, 1-D and read-only: a view of the mapped file, which stays mapped as long as a view lives, or a
        copy where rows had to be moved or values changed. What has to be made is made by who asks first, and kept.
        (Not a cached_property: before Python 3.12 that has one lock for all tensors.)"""
        if isinstance(self.source, np.ndarray):
            return self.source
        made: Bytes | None = vars(self).get(_MADE)
        if made is None:
            made = self.source(0, self.shape[0])
            made.flags.writeable = False
            vars(self)[_MADE] = made
        return made

    @property
    def num_bytes(self) -> int:
        entry = readable_type(self.type)
        return math.prod(self.shape) // entry.block_size * entry.block_bytes

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Dequantized values in a new array of shape ``shape``, columns in order."""
        values = to_float32(self.type, self.data).reshape(self.shape)
        if self.input_order is None:
            return values
        in_order = np.empty_like(values)
        in_order[:, self.input_order] = values
        return in_order

    def row_pieces(self, num_bytes: int) -> Iterator[tuple[int, "CheckpointTensor"]]:
        """(first row, these rows) one after another: parts of about so many bytes, in views of the same data, or in
        bytes that are made for them alone. A tensor whose rows are not whole blocks comes in one part."""
        num_rows = self.shape[0] if self.shape else 1
        row_bytes = self.num_bytes // max(num_rows, 1)
        if self.num_bytes <= num_bytes or row_bytes % readable_type(self.type).block_bytes:
            yield 0, self
            return
        step = max(num_bytes // row_bytes // 16, 1) * 16  # kernels take outputs by sixteen
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            source: Bytes | Callable[[int, int], Bytes]
            if isinstance(self.source, np.ndarray) or self.num_bytes <= _MADE_BYTES:
                source = self.data[first * row_bytes : last * row_bytes]
            else:
                source = partial(_further_rows, self.source, first)
            yield first, replace(self, shape=(last - first, *self.shape[1:]), source=source)


def _further_rows(source: Callable[[int, int], Bytes], start: int, first: int, last: int) -> Bytes:
    return source(start + first, start + last)


class _MappedFiles:
    """Files that are mapped once while tensors that need them follow each other."""

    def __init__(self) -> None:
        self._data: dict[Path, Bytes] = {}

    def of(self, tensor: PlacedTensor) -> dict[Path, Bytes]:
        """Those of the tensor; others are let go."""
        paths = {part.file for part in tensor.stored}
        self._data = {path: self._data[path] if path in self._data else map_file(path) for path in paths}
        return self._data


class CheckpointTensors:
    """All tensors that a model loads, in the order of the files' bytes; ``hf_overrides`` as in `read_model_facts`.

    Attributes:
        types: name → storage type, known before any data is read.
    input_orders: name → ``input_order``, where there is one; likewise.

    Raises:
        CheckpointError: a missing, truncated or malformed file, before the first tensor is given out.
        UnsupportedError: a format, architecture, type or quantization that octavo does not have.
    """

    def __init__(self, path: Path, hf_overrides: dict[str, Any] | None = None) -> None:
        checkpoint = open_checkpoint(path, hf_overrides)
        for remark in checkpoint.remarks:
            logger.info("%s: %s", path, remark)
        for cost in checkpoint.costs:
            logger.warning("%s: %s", path, cost)
        self._tensors = sorted(checkpoint.tensors, key=_place)
        self.types = {tensor.placement.name: _type_of(tensor) for tensor in self._tensors}
        orders = {tensor.placement.name: _input_order(tensor) for tensor in self._tensors}
        self.input_orders = {name: order for name, order in orders.items() if order is not None}

    def __iter__(self) -> Iterator[CheckpointTensor]:
        files = _MappedFiles()
        for tensor in self._tensors:
            yield _read(tensor, files.of(tensor))


def iterate_tensors(path: Path, hf_overrides: dict[str, Any] | None = None) -> Iterator[CheckpointTensor]:
    """As `CheckpointTensors` gives them out."""
    yield from CheckpointTensors(path, hf_overrides)


def _type_of(tensor: PlacedTensor) -> str:
    """As it is given out."""
    if tensor.placement.offset:
        return "F32"
    return tensor.entry.type.name if tensor.weight is None else tensor.weight.type


def _input_order(tensor: PlacedTensor) -> npt.NDArray[np.int32] | None:
    """As it is given out."""
    return None if tensor.weight is None or tensor.placement.offset else tensor.weight.input_order


def _place(tensor: PlacedTensor) -> tuple[str, int]:
    return str(tensor.file), tensor.entry.offset


def _read(tensor: PlacedTensor, files: dict[Path, Bytes]) -> CheckpointTensor:
    entry, placement = tensor.entry, tensor.placement
    kind, shape, order = entry.type.name, entry.shape, None
    if tensor.weight is not None:
        kind, shape = tensor.weight.type, tensor.weight.shape
        rows = _rows_of(tensor.weight, files)
        order = tensor.weight.input_order
        if placement.rows is None:
            return CheckpointTensor(placement.name, kind, shape, rows, str(tensor.file), order)
        own = rows(0, shape[0])
    else:
        own = files[tensor.file][entry.offset : entry.offset + entry.num_bytes]
    if placement.rows is not None:
        if placement.rows.num_rows != shape[0]:
            raise CheckpointError(
                f"has {shape[0]} rows, {placement.rows.num_rows} are expected",
                file=str(tensor.file),
                tensor=entry.name,
            )
        own = placement.rows.apply(own)
    read = CheckpointTensor(placement.name, kind, shape, own, str(tensor.file), order)
    if placement.offset:
        values = read.to_float32() + np.float32(placement.offset)
        read = replace(read, type="F32", source=values.view(np.uint8).reshape(-1), input_order=None)
    read.data.flags.writeable = False
    return replace(read, shape=(math.prod(shape),)) if placement.flat else read


def _rows_of(weight: QuantizedWeight, files: dict[Path, Bytes]) -> Callable[[int, int], Bytes]:
    """Makes the bytes of the rows from one number to before another."""
    arrays = {suffix: part.array(files[part.file]) for suffix, part in weight.parts.stored.items()}
    return partial(weight.rows, arrays)
