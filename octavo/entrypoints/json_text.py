"""What the decoder of a JSON text does not say: that a field stands twice in one object, where it keeps the last one,
and that there is half of a surrogate pair, which it may take for an end that is missing.
"""

import json
import re
from typing import Any, NamedTuple

__all__ = ["RepeatedField", "between_strings", "lone_surrogate", "repeated_field"]

_SLICE = 1 << 20
# Longer texts are not read a second time to find a name, and of them only the end is looked at.
_LONGEST_READ = 64 * 1024

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_CUT_OFF = rb"(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z"
# Not after a backslash that is itself escaped.
_LONE = re.compile(rb"(?<!\\)(?:\\\\)*(%b(?!%b|%b)|(?<!%b)%b)" % (_HIGH, _LOW, _CUT_OFF, _HIGH, _LOW))


class RepeatedField(NamedTuple):
    """``name``: "" where it was not looked for. ``is_outermost``: of the text's own object, not of one within."""

    name: str
    is_outermost: bool


def repeated_field(text: bytes, value: dict[str, Any]) -> RepeatedField | None:
    """Args:

    text: a JSON object, valid.
    value: what a decoder has made of it: as many colons are between the strings of the text as it has fields.
    """
    num_colons = text.count(b":")
    if num_colons == len(value):
        return None
    num_kept = _num_fields(value)
    if num_colons == num_kept or between_strings(text).count(b":") == num_kept:
        return None
    return _named(text) if len(text) <= _LONGEST_READ else RepeatedField("", False)


def _num_fields(value: dict[str, Any]) -> int:
    """Of all objects in it."""
    num_fields = 0
    left: list[Any] = [value]
    while left:
        entries = left.pop()
        if isinstance(entries, dict):
            num_fields += len(entries)
            entries = entries.values()
        left += [entry for entry in entries if type(entry) is dict or type(entry) is list]
    return num_fields


def _named(text: bytes) -> RepeatedField:
    within: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> str | None:
        names = set[str]()
        for name, _ in pairs:
            if name in names:
                within.append(name)
                return name
            names.add(name)
        return None

    try:
        own = json.loads(text, object_pairs_hook=look)  # what the outermost object's look has found
    except (ValueError, RecursionError):  # it takes less than the decoder
        own = None
    return RepeatedField(own, True) if own is not None else RepeatedField(within[0] if within else "", False)


def between_strings(text: bytes) -> bytes:
    """What stands between the strings of a JSON text, in slices, for others to go on in between."""
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = []
    within = 0
    for begin in range(0, len(text), _SLICE):
        parts = text[begin : begin + _SLICE].split(b'"')
        outside.append(b"".join(parts[within::2]))
        within = (within + len(parts) - 1) % 2
    return b"".join(outside)


def lone_surrogate(text: bytes) -> str | None:
    """An escape that is half of a surrogate pair, if there is one near the end of the text: where the decoder finds
    fewer bytes behind it than another escape has, it says that the text was cut off there."""
    found = _LONE.search(text, max(0, len(text) - _LONGEST_READ))
    return None if found is None else found[1].decode()
