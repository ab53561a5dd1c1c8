"""The GGUF container: metadata and the places of tensors. Knows no model; nothing of the tensors' data is read.

Every count and length in the file is checked against the bytes that are left before anything is allocated for it, so
that a damaged file costs a message and not memory.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoints.tensor_entry import (
    MAX_NAME_LENGTH,
    TensorEntry,
    check_no_overlap,
    first_repeated,
    map_file,
    shown,
)
from octavo.checkpoints.tensor_types import GGML_TYPES, REMOVED_GGML_TYPES, TensorType
from octavo.errors import CheckpointError, UnsupportedError

__all__ = ["GGUFFile", "read_gguf_file", "read_gguf_metadata"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_KEY_BYTES = 65535  # the format's own limit
_MAX_DIMENSIONS = 4  # ggml's
_MAX_ARRAY_NESTING = 4
# Far above any vocabulary (a quarter of a million tokens, with types, scores and merges), far below any memory.
_MAX_ARRAY_ITEMS = 1 << 23
_MAX_METADATA_BYTES = 1 << 28
_MAX_FIELDS = 1 << 16
_MAX_TENSORS = 1 << 17
_MIN_FIELD_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_STRING, _ARRAY, _BOOL = 8, 9, 7
# Value type → code, which struct and numpy share.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True)
class GGUFFile:
    """Attributes:

    path: the file.
    metadata: key → number, bool, string or list.
    tensors: in the file's order; shapes in torch order, offsets from the beginning of the file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: list[TensorEntry]


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """The file's key-value pairs: numbers, bools, strings, and lists of these.

    Raises:
        CheckpointError: a missing, truncated or malformed file.
        UnsupportedError: a version of the format, or a byte order, that octavo does not read.
    """
    reader = _Reader(path)
    _, num_fields = _read_counts(reader)
    return _read_metadata(reader, num_fields)


def read_gguf_file(path: Path) -> GGUFFile:
    """Metadata and tensor list. Raises as `read_gguf_metadata`, and UnsupportedError for types ggml does not have."""
    reader = _Reader(path)
    num_tensors, num_fields = _read_counts(reader)
    metadata = _read_metadata(reader, num_fields)
    alignment = _alignment(metadata, path)
    infos = [_read_tensor_info(reader) for _ in range(num_tensors)]
    data_start = -(-reader.position // alignment) * alignment
    tensors = [_entry(*info, data_start, alignment, reader.size, path) for info in infos]
    repeated = first_repeated(tensor.name for tensor in tensors)
    if repeated is not None:
        raise CheckpointError("stands twice in the tensor list", file=str(path), tensor=repeated)
    check_no_overlap(tensors, path)
    return GGUFFile(path, metadata, tensors)


class _Reader:
    """A position in the mapped file, and reads that never pass its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = map_file(path).data
        self.size = len(self.data)
        self.position = 0
        self.array_items = 0
        self.what = "header"  # what is being read, for messages

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.what}: {what}", file=str(self.path))

    def take(self, num_bytes: int) -> memoryview:
        left = self.size - self.position
        if num_bytes > left:
            raise self.wrong(f"truncated: {num_bytes} bytes needed at {self.position}, the file has {left} left")
        start = self.position
        self.position += num_bytes
        return self.data[start : self.position]

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self, max_bytes: int) -> str:
        length = self.number("<Q")
        if length > max_bytes:
            raise self.wrong(f"a string of {length} bytes, at most {max_bytes} are expected")
        try:
            return str(self.take(length), "utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong(f"a string that is not UTF-8 (at byte {self.position - length})") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(_MAX_METADATA_BYTES)
        if kind == _ARRAY:
            return self._array(depth + 1)
        if kind not in _NUMBERS:
            raise self.wrong(f"value type {kind} is none of GGUF's")
        value = self.number(_NUMBERS[kind])
        if kind == _BOOL:
            if value > 1:
                raise self.wrong(f"a bool of value {value}")
            return bool(value)
        return value

    def _array(self, depth: int) -> list[Any]:
        if depth > _MAX_ARRAY_NESTING:
            raise self.wrong(f"arrays nested more than {_MAX_ARRAY_NESTING} deep")
        kind, count = self.number("<I"), self.number("<Q")
        self.array_items += count
        if self.array_items > _MAX_ARRAY_ITEMS:
            raise self.wrong(f"an array of {count} items, the file may have {_MAX_ARRAY_ITEMS} in all")
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
            if kind == _BOOL:
                if count and values.max() > 1:
                    raise self.wrong(f"a bool of value {values.max()}")
                values = values.astype(bool)
            return list(values.tolist())
        if kind == _STRING:
            return self._strings(count)
        return [self.value(kind, depth) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """As `string` again and again, five times as quick: a vocabulary has a hundred thousand of them."""
        data, position, size = self.data, self.position, self.size
        length_at = struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(data, position)[0]
                if position > size:
                    raise self.wrong(f"truncated: a string at {start} ends after the file's {size} bytes")
                found.append(str(data[start:position], "utf-8"))
        except struct.error as error:
            raise self.wrong(f"truncated: string {len(found)} of {count} begins after the file's end") from error
        except UnicodeDecodeError as error:
            raise self.wrong(f"string {len(found)} of {count} is not UTF-8") from error
        self.position = position
        return found


def _read_counts(reader: _Reader) -> tuple[int, int]:
    """(tensors, fields), after the checks of magic, version and byte order."""
    if bytes(reader.data[:4]) != _MAGIC:
        raise CheckpointError(f"not a GGUF file: it begins with {bytes(reader.data[:4])!r}", file=str(reader.path))
    reader.position = 4
    version = reader.number("<I")
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(f"{reader.path}: a big-endian GGUF file; octavo reads little-endian ones")
    if version not in _VERSIONS:
        raise UnsupportedError(f"{reader.path}: GGUF version {version}; octavo reads versions 2 and 3")
    num_tensors, num_fields = reader.number("<Q"), reader.number("<Q")
    if num_tensors * _MIN_TENSOR_BYTES + num_fields * _MIN_FIELD_BYTES > reader.size - reader.position:
        raise reader.wrong(
            f"truncated: {num_tensors} tensors and {num_fields} metadata fields are announced, "
            f"more than a file of {reader.size} bytes can hold"
        )
    if num_tensors > _MAX_TENSORS or num_fields > _MAX_FIELDS:
        raise reader.wrong(
            f"{num_tensors} tensors and {num_fields} metadata fields; octavo reads {_MAX_TENSORS} and {_MAX_FIELDS}"
        )
    return num_tensors, num_fields


def _read_metadata(reader: _Reader, num_fields: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_fields):
        reader.what = f"metadata field {index}"
        key = reader.string(_MAX_KEY_BYTES)
        reader.what = f"metadata key {shown(key)}"
        if key in metadata:
            raise reader.wrong("stands twice")
        metadata[key] = reader.value(reader.number("<I"))
        if reader.position > _MAX_METADATA_BYTES:
            raise reader.wrong(f"the metadata take more than {_MAX_METADATA_BYTES} bytes")
    return metadata


def _alignment(metadata: dict[str, Any], path: Path) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(
            f"general.alignment must be a power of two up to {_MAX_ALIGNMENT}, got {shown(alignment)}", file=str(path)
        )
    return alignment


def _read_tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape in torch order, type id, offset from the beginning of the data)."""
    reader.what = "tensor list"
    name = reader.string(MAX_NAME_LENGTH)
    reader.what = f"tensor {name!r}"
    num_dimensions = reader.number("<I")
    if not name or not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise reader.wrong(f"a name and 1 to {_MAX_DIMENSIONS} dimensions are expected, got {num_dimensions}")
    # GGUF lists the contiguous dimension first.
    shape = tuple(reversed([reader.number("<Q") for _ in range(num_dimensions)]))
    return name, shape, reader.number("<I"), reader.number("<Q")


def _entry(
    name: str, shape: tuple[int, ...], type_id: int, offset: int, data_start: int, alignment: int, size: int, path: Path
) -> TensorEntry:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(what, file=str(path), tensor=name)

    tensor_type = _type(type_id, name, path)
    if min(shape) < 1:
        raise wrong(f"shape {list(shape)} has an empty dimension")
    if shape[-1] % tensor_type.block_size:
        raise wrong(f"rows of {shape[-1]} values are not whole {tensor_type.name} blocks of {tensor_type.block_size}")
    if offset % alignment:
        raise wrong(f"offset {offset} is not a multiple of the alignment {alignment}")
    num_bytes = math.prod(shape) // tensor_type.block_size * tensor_type.block_bytes
    missing = data_start + offset + num_bytes - size
    if missing > 0:
        raise wrong(f"truncated: the file of {size} bytes ends {missing} bytes before the tensor does")
    return TensorEntry(name, tensor_type, shape, data_start + offset, num_bytes)


def _type(type_id: int, name: str, path: Path) -> TensorType:
    if type_id in GGML_TYPES:
        return GGML_TYPES[type_id]
    known = REMOVED_GGML_TYPES.get(type_id)
    what = f"type {known}, which GGUF has withdrawn" if known else f"type id {type_id}, which octavo does not know"
    raise UnsupportedError(f"{path}: tensor {name!r}: {what}")
