"""The tensors that one module's weight is kept in, each under what stands after the module's name (``qweight``, …)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoints.tensor_entry import TensorEntry, map_file
from octavo.errors import CheckpointError

__all__ = ["FLOATS", "SCALES", "Array", "Arrays", "Parts", "StoredTensor", "as_float32"]

Array = npt.NDArray[Any]
# What a module's tensors hold, by suffix, shaped as the file has them.
Arrays = Mapping[str, Array]

FLOATS = ("F32", "F16", "BF16")
SCALES = (*FLOATS, "F8_E8M0")

# What e8m0 stands for: powers of two; all ones are not a number.
_POWERS = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)

# Words of packed numbers are taken without a sign; bfloat16 and floats of 8 bits as their bits.
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "i1", "I32": "<u4", "I64": "<i8"}
_DTYPES |= {"F8_E4M3": "u1", "F8_E8M0": "u1"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the file that it lies in."""

    file: Path
    entry: TensorEntry

    def array(self, data: npt.NDArray[np.uint8] | None = None) -> Array:
        """Its values: a view of ``data``, all bytes of its file, which is mapped here where they are not given."""
        data = map_file(self.file) if data is None else data
        own = data[self.entry.offset : self.entry.offset + self.entry.num_bytes]
        return own.view(_DTYPES[self.entry.type.name]).reshape(self.entry.shape)


def as_float32(values: Array) -> npt.NDArray[np.float32]:
    """Scales of any of the types in ``SCALES``, as `StoredTensor.array` gives them."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if values.dtype == np.uint8:
        return _POWERS.take(values)
    return values.astype(np.float32)


class Parts:
    """Look-ups among a module's tensors, with checks that name file and tensor.

    Args:
        module: its name in the checkpoint.
        stored: suffix → tensor; not empty.
    """

    def __init__(self, module: str, stored: Mapping[str, StoredTensor]) -> None:
        self.module = module
        self.stored = stored

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.stored

    def has_any(self, *suffixes: str) -> bool:
        return any(suffix in self.stored for suffix in suffixes)

    def wrong(self, suffix: str, message: str) -> CheckpointError:
        """An error to raise that names the tensor, or the module's file where there is no such tensor."""
        known = self.stored.get(suffix) or next(iter(self.stored.values()))
        return CheckpointError(message, file=str(known.file), tensor=f"{self.module}.{suffix}")

    def type_of(self, suffix: str, *supported: str) -> str:
        """The tensor's type. Raises CheckpointError where it is missing, or of none of these types."""
        if suffix not in self.stored:
            others = ", ".join(sorted(self.stored))
            raise self.wrong(suffix, f"is missing; {self.module} has {others}")
        name = self.stored[suffix].entry.type.name
        if name not in supported:
            raise self.wrong(suffix, f"is of type {name}, expected {' or '.join(supported)}")
        return name

    def shape_of(self, suffix: str) -> tuple[int, ...]:
        return self.stored[suffix].entry.shape

    def matrix(self, suffix: str, *types: str) -> tuple[int, int]:
        """Shape of a tensor of one of these types that must be a matrix, and not an empty one."""
        self.type_of(suffix, *types)
        shape = self.shape_of(suffix)
        if len(shape) != 2 or 0 in shape:
            raise self.wrong(suffix, f"has shape {list(shape)}, a matrix is expected")
        return shape[0], shape[1]

    def check(self, suffix: str, types: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raises CheckpointError unless the tensor is of one of these types and one of these shapes."""
        self.type_of(suffix, *types)
        shape = self.shape_of(suffix)
        if shape not in shapes:
            expected = " or ".join(str(list(each)) for each in shapes)
            raise self.wrong(suffix, f"has shape {list(shape)}, expected {expected}")

    def array(self, suffix: str) -> Array:
        """The tensor's values, read now: for small ones that say how the others are to be read."""
        return self.stored[suffix].array()
