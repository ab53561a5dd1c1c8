"""Where the numbers of a GGUF file's header are: the format as its specification has it, read without any check."""

import struct
from functools import lru_cache

__all__ = ["gguf_numbers"]

_STRING, _ARRAY = 8, 9
_CODES = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
# Of a long array only the beginning: it would outweigh all the rest.
_ITEMS = 20


@lru_cache(maxsize=16)
def gguf_numbers(data: bytes) -> list[tuple[int, str]]:
    """(position, struct code) of counts, lengths, types, values, sizes and offsets."""
    walk = _Walk(data)
    walk.number("<I")  # version
    num_tensors, num_fields = walk.number("<Q"), walk.number("<Q")
    for _ in range(num_fields):
        walk.string()
        walk.value(walk.number("<I"))
    for _ in range(num_tensors):
        walk.string()
        for _ in range(walk.number("<I")):
            walk.number("<Q")
        walk.number("<I")
        walk.number("<Q")
    return walk.found


class _Walk:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 4
        self.found: list[tuple[int, str]] = []

    def number(self, code: str, noted: bool = True) -> int:
        if noted:
            self.found.append((self.position, code))
        (value,) = struct.unpack_from(code, self.data, self.position)
        self.position += struct.calcsize(code)
        return int(value) if code not in ("<f", "<d") else 0

    def string(self, noted: bool = True) -> None:
        length = self.number("<Q", noted)
        self.position += length

    def value(self, kind: int, noted: bool = True) -> None:
        if kind == _STRING:
            self.string(noted)
        elif kind == _ARRAY:
            kind, count = self.number("<I"), self.number("<Q")
            for index in range(min(count, len(self.data))):
                self.value(kind, index < _ITEMS)
        elif kind in _CODES:
            self.number(_CODES[kind], noted)
        else:
            raise struct.error("no type of GGUF's")
