"""Where one tensor lies in one file: what the readers of both formats find, before any byte of it is looked at."""

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.checkpoints.tensor_types import TensorType
from octavo.errors import CheckpointError

__all__ = ["MAX_NAME_LENGTH", "TensorEntry", "check_no_overlap", "first_repeated", "map_file", "open_error", "shown"]

# Longer names are taken for damage: an error message must stay readable.
MAX_NAME_LENGTH = 512


@dataclass(frozen=True)
class TensorEntry:
    """Attributes:

    name: as the file has it.
    type: storage type; the reader may know it and octavo may still not read it.
    shape: row-major, the last dimension contiguous (torch order).
    offset: bytes from the beginning of the file.
    num_bytes: size of the data.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def shown(value: object, limit: int = 80) -> str:
    """``repr(value)``, cut: for values from a file in a message. Of a large value only the beginning is looked at."""
    if isinstance(value, list) and len(value) > limit:
        value = value[:limit]
    text = repr(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit else text[:limit] + "…"


def open_error(path: Path, error: OSError) -> CheckpointError:
    """What to raise where ``path`` cannot be read."""
    return CheckpointError(f"cannot be read: {error.strerror or error}", file=str(path))


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The file's bytes, mapped read-only. The mapping ends with the last array that refers to it."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise open_error(path, error) from error


def first_repeated(names: Iterable[str]) -> str | None:
    """The first name that has stood before, if any."""
    seen = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def check_no_overlap(entries: list[TensorEntry], path: Path) -> None:
    """Raises CheckpointError where two tensors share bytes."""
    ordered = sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes))
    for before, after in pairwise(ordered):
        if after.offset < before.offset + before.num_bytes:
            raise CheckpointError(
                f"its data overlaps that of tensor {before.name!r}", file=str(path), tensor=after.name
            )
