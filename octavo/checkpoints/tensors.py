"""The tensors of a checkpoint, one after another, as bytes on the mapped file."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoints.checkpoint import PlacedTensor, open_checkpoint
from octavo.checkpoints.tensor_entry import map_file
from octavo.checkpoints.tensor_types import readable_type, to_float32
from octavo.errors import CheckpointError

__all__ = ["CheckpointTensor", "CheckpointTensors", "iterate_tensors"]


@dataclass(frozen=True)
class CheckpointTensor:
    """Attributes:

    name: its Hugging Face name.
    type: storage type, one of those that octavo reads (tensor_types.py).
    shape: torch order.
    data: its bytes, 1-D and read-only: a view of the mapped file, which stays mapped as long as a view lives, or a
        copy where rows had to be moved or values changed.
    file: path of the file that it is in.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    file: str

    @property
    def is_quantized(self) -> bool:
        """Whether values share a scale."""
        return readable_type(self.type).block_size > 1

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Dequantized values in a new array of shape ``shape``."""
        return to_float32(self.type, self.data).reshape(self.shape)

    def row_pieces(self, num_bytes: int) -> Iterator[tuple[int, "CheckpointTensor"]]:
        """(first row, these rows) one after another: parts of about so many bytes, in views of the same data. A tensor
        whose rows are not whole blocks comes in one part."""
        num_rows = self.shape[0] if self.shape else 1
        row_bytes = len(self.data) // max(num_rows, 1)
        if len(self.data) <= num_bytes or row_bytes % readable_type(self.type).block_bytes:
            yield 0, self
            return
        step = max(num_bytes // row_bytes // 16, 1) * 16  # kernels take outputs by sixteen
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            data = self.data[first * row_bytes : last * row_bytes]
            yield first, replace(self, shape=(last - first, *self.shape[1:]), data=data)


class CheckpointTensors:
    """All tensors that a model loads, in the order of the files' bytes; ``hf_overrides`` as in `read_model_facts`.

    Attributes:
        types: name → storage type, known before any data is read.

    Raises:
        CheckpointError: a missing, truncated or malformed file, before the first tensor is given out.
        UnsupportedError: a format, architecture, type or quantization that octavo does not have.
    """

    def __init__(self, path: Path, hf_overrides: dict[str, Any] | None = None) -> None:
        self._tensors = sorted(open_checkpoint(path, hf_overrides).tensors, key=_place)
        self.types = {tensor.placement.name: _type_of(tensor) for tensor in self._tensors}

    def __iter__(self) -> Iterator[CheckpointTensor]:
        opened: Path | None = None
        data = np.empty(0, np.uint8)
        for tensor in self._tensors:
            if tensor.file != opened:
                opened, data = tensor.file, map_file(tensor.file)
            yield _read(tensor, data)


def iterate_tensors(path: Path, hf_overrides: dict[str, Any] | None = None) -> Iterator[CheckpointTensor]:
    """As `CheckpointTensors` gives them out."""
    yield from CheckpointTensors(path, hf_overrides)


def _type_of(tensor: PlacedTensor) -> str:
    """As it is given out."""
    return "F32" if tensor.placement.offset else tensor.entry.type.name


def _place(tensor: PlacedTensor) -> tuple[str, int]:
    return str(tensor.file), tensor.entry.offset


def _read(tensor: PlacedTensor, data: npt.NDArray[np.uint8]) -> CheckpointTensor:
    entry = tensor.entry
    own = data[entry.offset : entry.offset + entry.num_bytes]
    placement = tensor.placement
    if placement.rows is not None:
        if placement.rows.num_rows != entry.shape[0]:
            raise CheckpointError(
                f"has {entry.shape[0]} rows, {placement.rows.num_rows} are expected",
                file=str(tensor.file),
                tensor=entry.name,
            )
        own = placement.rows.apply(own)
    if placement.offset:
        own = (to_float32(entry.type.name, own) + np.float32(placement.offset)).view(np.uint8)
    own.flags.writeable = False
    shape = (math.prod(entry.shape),) if placement.flat else entry.shape
    return CheckpointTensor(placement.name, _type_of(tensor), shape, own, str(tensor.file))
