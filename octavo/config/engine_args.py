"""What was stated, by flag or by keyword: one set of names for both, taken from the config dataclasses."""

import argparse
import difflib
from typing import Any

from octavo.config.cache import CacheConfig
from octavo.config.compilation import CompilationConfig
from octavo.config.flags import Flag, add_flags, flags_of
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


def _options() -> dict[str, Flag]:
    """Keyword → option of the engine."""
    return flags_of(_GROUPS)


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
                checked = option.checked(value)
                if checked is not None:
                    self.stated[option.group][option.item.name] = checked

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds a flag for every option but the model, which is a positional argument of its command; vLLM's other
        flags too, which ``--help`` does not tell of."""
        add_flags(parser, {keyword: flag for keyword, flag in _options().items() if keyword != "model"})
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
