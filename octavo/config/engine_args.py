"""What was stated, by flag or by keyword: one set of names for both, taken from the config dataclasses."""

import argparse
import dataclasses
import difflib
import types
import typing
from typing import Any

from octavo.config.cache import CacheConfig
from octavo.config.model import ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.errors import ConfigError

__all__ = ["EngineArgs"]

_GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "observability": ObservabilityConfig,
}


def _options() -> dict[str, tuple[str, dataclasses.Field[Any], Any]]:
    """Keyword → (group, field, type). A keyword is the flag's name with underscores."""
    found = {}
    for group, config in _GROUPS.items():
        hints = typing.get_type_hints(config)
        for item in dataclasses.fields(config):
            if "help" in item.metadata:
                flag = item.metadata["flag"] or item.name
                found[flag.replace("-", "_")] = (group, item, hints[item.name])
    return found


def _base_type(hint: Any) -> Any:
    """``int | None`` → int."""
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


class EngineArgs:
    """Stated values only; what is None or absent is resolved later.

    Raises:
        ConfigError: an unknown keyword, or a value of the wrong type.
    """

    def __init__(self, **stated: Any) -> None:
        known = _options()
        self.stated: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
        for keyword, value in stated.items():
            if keyword not in known:
                close = difflib.get_close_matches(keyword, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"
                raise ConfigError(f"unknown option {keyword!r}{hint}")
            if value is None:
                continue
            group, item, hint_type = known[keyword]
            self.stated[group][item.name] = _checked(keyword, value, _base_type(hint_type), item.metadata["choices"])

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds a flag for every option but the model, which is a positional argument of its command."""
        groups = {name: parser.add_argument_group(f"{name} options") for name in _GROUPS}
        for keyword, (group, item, hint) in _options().items():
            if keyword == "model":
                continue
            base = _base_type(hint)
            default = "" if item.default is None else f" (default: {item.default})"
            settings: dict[str, Any] = {"default": None, "help": item.metadata["help"] + default, "dest": keyword}
            if base is bool:
                settings["action"] = argparse.BooleanOptionalAction
            elif typing.get_origin(base) is list:
                settings.update(nargs="+", metavar="NAME")
            else:
                settings.update(type=base, choices=item.metadata["choices"])
                if settings["choices"] is None:
                    settings["metavar"] = {int: "N", float: "X", str: "TEXT"}[base]
            groups[group].add_argument("--" + keyword.replace("_", "-"), **settings)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """The stated options among the parsed arguments."""
        return cls(**{keyword: getattr(args, keyword) for keyword in _options() if hasattr(args, keyword)})


def _checked(keyword: str, value: Any, kind: Any, choices: tuple[str, ...] | None) -> Any:
    if typing.get_origin(kind) is list:
        value = [value] if isinstance(value, str) else list(value)
        if not value or not all(isinstance(entry, str) and entry for entry in value):
            raise ConfigError(f"{keyword} must be a name or a list of names, got {value!r}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{keyword} must be {kind.__name__}, got {value!r}")
    if choices and value not in choices:
        raise ConfigError(f"{keyword} must be one of {', '.join(choices)}; got {value!r}")
    return value
