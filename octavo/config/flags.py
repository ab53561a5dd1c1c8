"""A field of a config dataclass as something that can be stated: by flag, by keyword, in a file. One check for all."""

import argparse
import dataclasses
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import ConfigError

__all__ = ["Flag", "add_flags", "flags_of"]

_EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a name or a list of names",
    dict: "a JSON object",
}
# Numbers as vLLM takes them: 8k is 8000, 8K is 8192.
_SHORT_NUMBER = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([kKmMgGtT])")
_FACTORS = {unit: 1000**power for power, unit in enumerate("kmgt", 1)}
_FACTORS |= {unit: 1024**power for power, unit in enumerate("KMGT", 1)}
_METAVARS = {int: "N", float: "X", str: "TEXT", list: "NAME", dict: "JSON"}


class Flag:
    """Attributes:

    keyword: the flag's name with underscores.
    group: name of the config that the field belongs to.
    kind: int, float, bool, str, list (of strings) or dict.

    Raises:
        TypeError: a number without bounds: it would be found wrong late, or never.
    """

    def __init__(self, group: str, item: "dataclasses.Field[Any]", hint: Any) -> None:
        self.group = group
        self.item = item
        self.keyword = (item.metadata["flag"] or item.name).replace("-", "_")
        if isinstance(hint, types.UnionType):  # int | None
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        self.kind: type = typing.get_origin(hint) or hint
        if self.kind in (int, float) and None in (item.metadata["least"], item.metadata["most"]):
            raise TypeError(f"{self.flag} needs least and most")

    @property
    def flag(self) -> str:
        return "--" + self.keyword.replace("_", "-")

    def checked(self, value: Any) -> Any:
        """The value, if this option can have it; None where it is to be chosen.

        Raises:
            ConfigError
        """
        kind = self.kind
        if any(value == known and type(value) is type(known) for known in self.item.metadata["unstated"]):
            return None
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
        if not right or not self._is_within(value):
            raise ConfigError(f"{self.flag} must be {self._expected()}, got {value!r:.200}")
        refusal = (self.item.metadata["refused"] or {}).get(value) if kind is str else None
        if refusal:
            raise ConfigError(f"{self.flag} {value}: {refusal}")
        choices = self.item.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{self.flag} must be one of {', '.join(choices)}; got {value!r:.200}")
        return value

    def _is_within(self, value: Any) -> bool:
        least, most = self.item.metadata["least"], self.item.metadata["most"]
        return least is None or bool(math.isfinite(value) and least <= value <= most)

    def _expected(self) -> str:
        expected, metadata = _EXPECTED[self.kind], self.item.metadata
        if metadata["metavar"] == "SECONDS":
            expected += " of seconds"
        if metadata["least"] is None:
            return expected
        return f"{expected} between {metadata['least']} and {metadata['most']}"

    def add_to(self, group: "argparse._ArgumentGroup", choices: tuple[str, ...] | None = None) -> None:
        """The flag.

        Args:
            choices: the values that are allowed, where the field's own declaration cannot know them.
        """
        metadata = self.item.metadata
        default = "" if self.item.default in (None, dataclasses.MISSING) else f" (default: {self.item.default})"
        help_text = (metadata["help"] + default).replace("%", "%%")
        settings: dict[str, Any] = {"default": None, "help": help_text, "dest": self.keyword}
        if self.kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            shown = choices or metadata["choices"]
            settings["metavar"] = metadata["metavar"] or (
                "{" + ",".join(shown) + "}" if shown else _METAVARS[self.kind]
            )
            settings["type"] = self._parser()
            if choices:
                settings["choices"] = choices
            if self.kind is list:
                settings |= {"nargs": "+", "action": _Words}
        names = [name for name in (metadata["short"], self.flag) if name]
        group.add_argument(*names, **settings)

    def _parser(self) -> Callable[[str], Any]:
        """From a word of the command line to the value; argparse names the flag in front of what is raised."""

        def parse(text: str) -> Any:
            try:
                if self.kind is list:
                    return self.checked(_read_list(text))
                return self.checked(_read_word(text, self.kind))
            except ConfigError as error:
                raise argparse.ArgumentTypeError(str(error).removeprefix(self.flag).lstrip(" :")) from error

        return parse


class _Words(argparse.Action):
    """A flag that takes several words, in one place or in several. What a file says is replaced, not added to."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        so_far = getattr(namespace, self.dest, None)
        if so_far is None or so_far is parser.get_default(self.dest):
            so_far = []
        setattr(namespace, self.dest, [*so_far, *itertools.chain.from_iterable(values)])


def _read_list(text: str) -> Any:
    """The word alone, or the JSON list that it is."""
    value = _read_word(text, dict) if text.startswith("[") else text
    return value if isinstance(value, list) else [text]


def _read_word(text: str, kind: type) -> Any:
    """What the word says, as ``kind``; the word itself where it says no such thing."""
    try:
        if kind is int and (short := _SHORT_NUMBER.fullmatch(text)):
            value = float(short[1]) * _FACTORS[short[2]]
            return int(value) if value.is_integer() else text
        return json.loads(text) if kind is dict else kind(text)
    except (ValueError, RecursionError):
        return text


def flags_of(groups: Mapping[str, type]) -> dict[str, Flag]:
    """Keyword → flag, for every option of these config dataclasses, given by group name."""
    found = {}
    for group, config in groups.items():
        hints = typing.get_type_hints(config)
        for item in dataclasses.fields(config):
            if "help" in item.metadata:
                flag = Flag(group, item, hints[item.name])
                found[flag.keyword] = flag
    return found


def add_flags(
    parser: argparse.ArgumentParser,
    flags: Mapping[str, Flag],
    choices: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Adds flags to a parser, under a heading for each group.

    Args:
        choices: keyword → allowed values, where the declaration cannot know them.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for keyword, flag in flags.items():
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(f"{flag.group} options")
        flag.add_to(groups[flag.group], (choices or {}).get(keyword))
