"""Quantized types that the products compute with as they are (csrc/cpu/formats.hpp)."""

from typing import NamedTuple

__all__ = ["CODED", "Format", "format_of", "keeps"]

_GROUP = 32
_BY_NAME = {"Q4_0": 1, "Q4_1": 2, "Q5_0": 3, "Q5_1": 4, "Q8_0": 5, "Q4_K": 6, "Q5_K": 7, "Q6_K": 8}
_WITH_SPAN = {"U4": 9, "U8": 10, "F8_E4M3": 11}


class Format(NamedTuple):
    """Attributes:

    number: the library's; 0: not quantized.
    span: inputs that share a scale, where the type has several such numbers.
    """

    number: int
    span: int


# Numbers of bfloat16 whose exponents are coded: no type of a checkpoint's.
CODED = Format(12, 0)


def keeps(type_name: str) -> bool:
    return _find(type_name) is not None


def format_of(type_name: str) -> Format:
    """Of a type's name; of the empty one: not quantized.

    Raises:
        ValueError: a type that is not kept.
    """
    found = Format(0, 0) if not type_name else _find(type_name)
    if found is None:
        raise ValueError(f"weights of type {type_name} are not kept quantized")
    return found


def _find(type_name: str) -> Format | None:
    if type_name in _BY_NAME:
        return Format(_BY_NAME[type_name], 0)
    name, _, span = type_name.partition(":")
    if name not in _WITH_SPAN or not span.isdecimal() or int(span) == 0 or int(span) % _GROUP:
        return None
    return Format(_WITH_SPAN[name], int(span))
