"""Typed reading of a Hugging Face config: a field that is missing or of the wrong kind is named, not guessed."""

import math
from collections.abc import Mapping
from typing import Any

from octavo.errors import CheckpointError

__all__ = ["flag", "number", "size"]

HfConfig = Mapping[str, Any]


def size(hf_config: HfConfig, name: str, default: int | None = None) -> int:
    """A whole number above 0. A missing field, or null, is the default; without one, an error."""
    value = hf_config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config: {name} must be a whole number above 0, got {value!r}")
    return value


def number(hf_config: HfConfig, name: str, default: float | None = None) -> float:
    """A number above 0."""
    value = hf_config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config: {name} must be a number above 0, got {value!r}")
    return float(value)


def flag(hf_config: HfConfig, name: str) -> bool:
    """true or false; missing is false."""
    value = hf_config.get(name) or False
    if not isinstance(value, bool):
        raise CheckpointError(f"config: {name} must be true or false, got {value!r}")
    return value
