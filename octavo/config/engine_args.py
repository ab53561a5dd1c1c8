"""What was stated, by flag or by keyword: one set of names for both, taken from the config dataclasses."""

import argparse
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Callable
from typing import Any

from octavo.config.cache import CacheConfig
from octavo.config.compilation import CompilationConfig
from octavo.config.load import LoadConfig
from octavo.config.model import ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.config.vllm_flags import AbsentFlag, absent_flags
from octavo.errors import ConfigError

__all__ = ["EngineArgs"]

_GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "load": LoadConfig,
    "compilation": CompilationConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "observability": ObservabilityConfig,
}
_EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a name or a list of names",
    dict: "a JSON object",
}
_METAVARS = {int: "N", float: "X", str: "TEXT", list: "NAME", dict: "JSON"}


class _Option:
    """A field of a config dataclass, as something that can be stated.

    Attributes:
        keyword: the flag's name with underscores.
        group: name of the config that it belongs to.
        kind: int, float, bool, str, list (of strings) or dict.
    """

    def __init__(self, group: str, item: "dataclasses.Field[Any]", hint: Any) -> None:
        self.group = group
        self.item = item
        self.keyword = (item.metadata["flag"] or item.name).replace("-", "_")
        if isinstance(hint, types.UnionType):  # int | None
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        self.kind: type = typing.get_origin(hint) or hint

    @property
    def flag(self) -> str:
        return "--" + self.keyword.replace("_", "-")

    def checked(self, value: Any) -> Any:
        """The value, if this option can have it.

        Raises:
            ConfigError
        """
        kind = self.kind
        if kind is list and isinstance(value, str | tuple):
            value = [value] if isinstance(value, str) else list(value)
        elif kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if kind is list:
            may_be_empty = self.item.default_factory is not dataclasses.MISSING
            right = right and all(isinstance(entry, str) and entry for entry in value) and bool(value or may_be_empty)
        if kind is str:
            right = right and value != ""
        if not right:
            raise ConfigError(f"{self.flag} must be {_EXPECTED[kind]}, got {value!r:.200}")
        refusal = (self.item.metadata["refused"] or {}).get(value) if kind is str else None
        if refusal:
            raise ConfigError(f"{self.flag} {value}: {refusal}")
        choices = self.item.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{self.flag} must be one of {', '.join(choices)}; got {value!r:.200}")
        return value

    def add_to(self, group: "argparse._ArgumentGroup") -> None:
        """The flag."""
        metadata = self.item.metadata
        default = "" if self.item.default in (None, dataclasses.MISSING) else f" (default: {self.item.default})"
        settings: dict[str, Any] = {"default": None, "help": metadata["help"] + default, "dest": self.keyword}
        if self.kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            choices = metadata["choices"]
            settings["metavar"] = metadata["metavar"] or (
                "{" + ",".join(choices) + "}" if choices else _METAVARS[self.kind]
            )
            settings["type"] = self._parser()
            if self.kind is list:
                settings["nargs"] = "+"
        names = [name for name in (metadata["short"], self.flag) if name]
        group.add_argument(*names, **settings)

    def _parser(self) -> Callable[[str], Any]:
        """From a word of the command line to the value; argparse names the flag in front of what is raised."""

        def parse(text: str) -> Any:
            try:
                if self.kind is list:
                    return text if text else self.checked([text])
                return self.checked(_read_word(text, self.kind))
            except ConfigError as error:
                raise argparse.ArgumentTypeError(str(error).removeprefix(self.flag).lstrip(" :")) from error

        return parse


def _read_word(text: str, kind: type) -> Any:
    """What the word says, as ``kind``; the word itself where it says no such thing."""
    try:
        return json.loads(text) if kind is dict else kind(text)
    except (ValueError, RecursionError):
        return text


def _options() -> dict[str, _Option]:
    """Keyword → option."""
    found = {}
    for group, config in _GROUPS.items():
        hints = typing.get_type_hints(config)
        for item in dataclasses.fields(config):
            if "help" in item.metadata:
                option = _Option(group, item, hints[item.name])
                found[option.keyword] = option
    return found


class _Absent(argparse.Action):
    """A flag of vLLM's that octavo does not have."""

    def __init__(self, known: AbsentFlag, **settings: Any) -> None:
        super().__init__(**settings)
        self.known = known

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        value = not str(option_string).startswith("--no-") if self.known.is_switch else values
        if not self.known.asks_for_nothing(value):
            parser.error(self.known.refusal())
        setattr(namespace, self.dest, value)


def _add_absent(known: AbsentFlag, parser: argparse.ArgumentParser) -> None:
    names = [name for name in (known.short, known.flag) if name]
    if known.is_switch:
        names.append(known.flag.replace("--", "--no-", 1))
    # Without a value, which argparse would otherwise complain of first, the value is one that nothing takes.
    arity: dict[str, Any] = {"nargs": 0} if known.is_switch else {"nargs": "?", "const": ""}
    parser.add_argument(*names, action=_Absent, known=known, dest=known.keyword, help=argparse.SUPPRESS, **arity)


class EngineArgs:
    """Stated values only; what is None or absent is resolved later.

    Attributes:
        stated: name of a config → field → value.
        without_effect: what was stated of vLLM's options that octavo does not have, and asks for nothing → why.

    Raises:
        ConfigError: an unknown keyword, one that octavo does not have, or a value of the wrong type.
    """

    def __init__(self, **stated: Any) -> None:
        known, absent = _options(), absent_flags()
        self.stated: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
        self.without_effect: dict[str, str] = {}
        for keyword, value in stated.items():
            if keyword in absent:
                if not absent[keyword].asks_for_nothing(value):
                    raise ConfigError(absent[keyword].refusal())
                if value is not None:
                    self.without_effect[absent[keyword].written(value)] = absent[keyword].why
                continue
            if keyword not in known:
                close = difflib.get_close_matches(keyword, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"
                raise ConfigError(f"unknown option {keyword!r}{hint}")
            if value is not None:
                option = known[keyword]
                self.stated[option.group][option.item.name] = option.checked(value)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds a flag for every option but the model, which is a positional argument of its command; vLLM's other
        flags too, which ``--help`` does not tell of."""
        groups = {name: parser.add_argument_group(f"{name} options") for name in _GROUPS}
        for keyword, option in _options().items():
            if keyword != "model":
                option.add_to(groups[option.group])
        for absent in absent_flags().values():
            _add_absent(absent, parser)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """The stated options among the parsed arguments."""
        return cls(**cls.stated_options(args))

    @staticmethod
    def stated_options(args: argparse.Namespace) -> dict[str, Any]:
        """The same as keywords of ``LLM`` and ``AsyncLLM``."""
        found = {name: getattr(args, name, None) for name in (*_options(), *absent_flags())}
        return {name: value for name, value in found.items() if value is not None}
