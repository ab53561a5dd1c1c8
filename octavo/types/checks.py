"""Typed and bounded values: what parameters of requests are checked with. Every refusal names the parameter."""

import math
from collections.abc import Collection
from typing import Any

from octavo.errors import RequestError

__all__ = [
    "check_boolean",
    "check_integer",
    "check_integers",
    "check_number",
    "check_numbers",
    "check_short_list",
    "check_strings",
    "wrong",
]


def wrong(name: str, value: Any, expected: str) -> RequestError:
    """The refusal of ``value``: what was expected, and what came."""
    return RequestError(f"{name} must be {expected}, got {_shown(value)}", param=name)


def check_boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")


def check_integer(name: str, value: Any, low: int, high: int, note: str = "") -> None:
    """A whole number from ``low`` to ``high``; ``note`` explains special values."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(name, value, "an integer")
    if not low <= value <= high:
        raise wrong(name, value, f"between {low} and {high}{note}")


def check_number(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    """A number from ``low`` (or above it, with ``low_open``) to ``high``; never NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(name, value, "a number")
    if not low <= value <= high or (low_open and value == low):  # nothing holds of a NaN
        bounds = f"above {low:g} and at most {high:g}" if low_open else f"between {low:g} and {high:g}"
        raise wrong(name, value, bounds)


def check_integers(name: str, values: Collection[Any], low: int, high: int) -> None:
    """``check_integer`` for each. There may be a million, checked on an event loop: looked at one by one only where
    something is wrong."""
    if not (set(map(type, values)) <= {int} and _all_between(values, low, high)):
        for value in values:
            check_integer(name, value, low, high)


def check_numbers(name: str, values: Collection[Any], low: float, high: float) -> None:
    """``check_number`` for each, in the same way."""
    if not (set(map(type, values)) <= {int, float} and _all_between(values, low, high)):
        for value in values:
            check_number(name, value, low, high)


def _all_between(values: Collection[Any], low: float, high: float) -> bool:
    """Of numbers; False where there is a NaN. ``min`` and ``max`` may pass over one, a sum does not."""
    return not values or (low <= min(values) and max(values) <= high and not math.isnan(sum(values)))


def check_short_list(name: str, value: Any, most: int, kind: str, expected: str) -> None:
    """A list of at most ``most`` entries. Comes before any look at them: there may be millions."""
    if not isinstance(value, list):
        raise wrong(name, value, expected)
    if len(value) > most:
        raise RequestError(f"{name} must be at most {most} {kind}, got {len(value)}", param=name)


def check_strings(name: str, value: Any, most: int, longest: int, expected: str) -> None:
    """A list of at most ``most`` strings of 1 to ``longest`` characters."""
    check_short_list(name, value, most, "strings", expected)
    if not all(isinstance(entry, str) for entry in value):
        raise wrong(name, value, expected)
    if "" in value:
        raise RequestError(f"{name} must not contain an empty string", param=name)
    found = max(map(len, value), default=0)
    if found > longest:
        message = f"{name} must be strings of at most {longest} characters, got one of {found}"
        raise RequestError(message, param=name)


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**128 else "a very large integer"
    return text if len(text) <= 60 else text[:57] + "..."
