"""JSON files of a checkpoint, and typed look-ups in them: every fault names the file and the field."""

import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from octavo.checkpoints.tensor_entry import open_error, shown
from octavo.errors import CheckpointError, ConfigError
from octavo.logging import init_logger

__all__ = ["REQUIRED", "Fields", "overridden", "read_json", "read_json_object"]

logger = init_logger(__name__)

_MAX_BYTES = 1 << 24
_MAX_DEPTH = 32

Decoded = TypeVar("Decoded")


class _Required:
    """Stands for "there is no default"."""


REQUIRED = _Required()


def read_json(path: Path, kind: type[Decoded], max_bytes: int = _MAX_BYTES) -> Decoded:
    """The file's content as ``kind`` (msgspec's rules: a Struct reads the fields it has and skips the rest)."""
    try:
        if path.stat().st_size > max_bytes:
            raise CheckpointError(f"larger than the {max_bytes} bytes that are expected at most", file=str(path))
        raw = path.read_bytes()
    except OSError as error:
        raise open_error(path, error) from error
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointError(f"not the JSON that is expected: {shown(str(error), 160)}", file=str(path)) from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The file's JSON object, of bounded size and depth."""
    found: dict[str, Any] = read_json(path, dict[str, Any])
    _check_plain(found, path, 0)
    return found


def _check_plain(value: Any, path: Path, depth: int) -> None:
    """The configuration travels between processes: whole numbers must fit 64 bits, nesting must be shallow."""
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"nested more than {_MAX_DEPTH} deep", file=str(path))
    if isinstance(value, dict):
        for item in value.values():
            _check_plain(item, path, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, path, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise CheckpointError(f"a whole number beyond 64 bits: {shown(value)}", file=str(path))
    elif isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"a number that JSON does not have: {value}", file=str(path))


def overridden(config: dict[str, Any], overrides: dict[str, Any], file: Path) -> dict[str, Any]:
    """``config`` of ``file`` as ``--hf-overrides`` wants it: a value takes the old one's place; of a sub-configuration
    (``text_config``, …) those values that are named do. Says which names the file does not have.

    Raises:
        ConfigError: an override that is not plain JSON.
    """
    if not overrides:
        return config
    try:
        _check_plain(overrides, Path("--hf-overrides"), 0)
        plain = msgspec.json.decode(msgspec.json.encode(overrides), type=dict[str, Any])
    except (msgspec.MsgspecError, CheckpointError, TypeError, RecursionError) as error:
        raise ConfigError(f"--hf-overrides must be plain JSON: {shown(str(error), 160)}") from error
    unknown = [name for name in plain if name not in config]
    if unknown:
        logger.warning("--hf-overrides: %s does not have %s; taken as stated", file, ", ".join(map(shown, unknown)))
    found = dict(config)
    for name, value in plain.items():
        old = config.get(name)
        nested = name.endswith("_config") and isinstance(old, dict) and isinstance(value, dict)
        found[name] = {**old, **value} if nested else value  # type: ignore[dict-item]
    return found


class Fields:
    """Look-ups in one object, with types and ranges. A missing field and null are the same: the default.

    Args:
        values: the object.
        file: for messages.
        where: what stands before a field's name in messages (``"rope_scaling."``).
    """

    def __init__(self, values: dict[str, Any], file: Path, where: str = "") -> None:
        self.values = values
        self.file = file
        self.where = where

    def wrong(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}{key} must be {expected}, got {shown(self.values.get(key))}", file=str(self.file)
        )

    def integer(self, key: str, low: int, high: int, default: Any = REQUIRED) -> Any:
        value = self.values.get(key)
        if value is None:
            return self._default(key, default, "a whole number")
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: Any = REQUIRED) -> Any:
        value = self.values.get(key)
        if value is None:
            return self._default(key, default, "a number")
        # In this order: a whole number too large for a float must not be made one.
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, default: Any = REQUIRED) -> Any:
        value = self.values.get(key)
        if value is None:
            return self._default(key, default, "true or false")
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def string(self, key: str, default: Any = REQUIRED) -> Any:
        value = self.values.get(key)
        if value is None:
            return self._default(key, default, "a string")
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def nested(self, key: str) -> "Fields | None":
        """The object under ``key``, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, self.file, f"{self.where}{key}.")

    def _default(self, key: str, default: Any, expected: str) -> Any:
        if default is REQUIRED:
            raise CheckpointError(f"{self.where}{key} is missing: {expected} is expected", file=str(self.file))
        return default
