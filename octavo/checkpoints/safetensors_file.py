"""The safetensors header: names, types, shapes and places of tensors, checked against each other and the file's size.

Own reader, because start-up needs it without torch and because every fault must name file and tensor.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any

from octavo.checkpoints.tensor_entry import (
    MAX_NAME_LENGTH,
    TensorEntry,
    check_no_overlap,
    first_repeated,
    open_error,
    shown,
)
from octavo.checkpoints.tensor_types import SAFETENSORS_TYPES
from octavo.errors import CheckpointError, UnsupportedError

__all__ = ["read_safetensors_entries"]

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMENSIONS = 32


def read_safetensors_entries(path: Path) -> list[TensorEntry]:
    """The file's tensors, in the order of their data.

    Raises:
        CheckpointError: a missing, truncated or malformed file.
        UnsupportedError: a data type that the format does not have.
    """
    header, data_start, file_size = _read_header(path)
    _check_metadata(header.get("__metadata__"), path)
    entries = [
        _entry(name, described, data_start, file_size, path)
        for name, described in header.items()
        if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    check_no_overlap(entries, path)
    end = data_start
    for entry in entries:
        if entry.offset != end:
            raise CheckpointError(
                f"{entry.offset - end} bytes before its data belong to no tensor", file=str(path), tensor=entry.name
            )
        end = entry.offset + entry.num_bytes
    if end != file_size:
        raise CheckpointError(f"{file_size - end} bytes at its end belong to no tensor", file=str(path))
    return entries


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(header, where the data begins, the file's size), in bytes."""
    try:
        with path.open("rb") as file:
            file_size = path.stat().st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if len(start) < 8 or length > min(_MAX_HEADER_BYTES, file_size - 8):
                raise CheckpointError(
                    f"truncated or not a safetensors file: a header of {length} bytes in a file of {file_size}",
                    file=str(path),
                )
            raw = file.read(length)
    except OSError as error:
        raise open_error(path, error) from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header is malformed: {shown(str(error))}", file=str(path)) from error
    if not isinstance(header, dict):
        raise CheckpointError("the header is not a JSON object", file=str(path))
    return header, 8 + length, file_size


def _check_metadata(metadata: Any, path: Path) -> None:
    """Nothing in it is used. A file in which it is not as the format has it is damaged all the same."""
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise CheckpointError(f"__metadata__ must map names to texts, got {shown(metadata)}", file=str(path))


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"{first_repeated(name for name, _ in pairs)!r} stands twice")
    return found


def _entry(name: str, described: Any, data_start: int, file_size: int, path: Path) -> TensorEntry:
    if not name or len(name) > MAX_NAME_LENGTH:
        raise CheckpointError(f"a tensor's name has {len(name)} characters: {shown(name)}", file=str(path))

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(what, file=str(path), tensor=name)

    if not isinstance(described, dict):
        raise wrong("its header entry is not a JSON object")
    type_name, shape, offsets = (described.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(type_name, str):
        raise wrong(f"dtype must be a string, got {shown(type_name)}")
    if type_name not in SAFETENSORS_TYPES:
        raise UnsupportedError(f"{path}: tensor {name!r}: safetensors has no data type {shown(type_name)}")
    if not isinstance(shape, list) or not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise wrong(f"shape must be a list of sizes, got {shown(shape)}")
    if not isinstance(offsets, list) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"data_offsets must be [begin, end], got {shown(offsets)}")
    begin, end = offsets
    tensor_type = SAFETENSORS_TYPES[type_name]
    bits = math.prod(shape) * tensor_type.block_bits
    if bits != 8 * (end - begin):
        raise wrong(f"data_offsets hold {end - begin} bytes, shape {shown(shape)} of {type_name} needs {-(-bits // 8)}")
    if data_start + end > file_size:
        missing = data_start + end - file_size
        raise wrong(f"truncated: the file of {file_size} bytes ends {missing} bytes before the tensor does")
    return TensorEntry(name, tensor_type, tuple(shape), data_start + begin, end - begin)


def _are_sizes(values: list[Any]) -> bool:
    """Whether all are whole numbers from 0 to 2**63 - 1."""
    return all(type(value) is int and 0 <= value < 2**63 for value in values)
