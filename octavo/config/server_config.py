"""What concerns the server and not the engine: gathered, and taken from the command line."""

import argparse
import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from octavo.config.access import AccessConfig
from octavo.config.answer import AnswerConfig
from octavo.config.flags import add_flags, flags_of
from octavo.config.http import HttpConfig
from octavo.config.limits import LimitsConfig
from octavo.config.logs import LogsConfig

__all__ = ["ServerConfig"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The settings of a server, as they are given to each of its front ends."""

    http: HttpConfig = field(default_factory=HttpConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    answer: AnswerConfig = field(default_factory=AnswerConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)

    @staticmethod
    def add_cli_args(
        parser: argparse.ArgumentParser,
        choices: Mapping[str, tuple[str, ...]] | None = None,
        groups: Collection[str] | None = None,
    ) -> None:
        """Adds a flag for every option.

        Args:
            choices: keyword → allowed values, where this room cannot know them.
            groups: names of the concerns that are wanted; None: all.
        """
        wanted = {name: config for name, config in _GROUPS.items() if groups is None or name in groups}
        add_flags(parser, flags_of(wanted), choices)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "ServerConfig":
        """What was stated among the parsed arguments, and the defaults."""
        stated: dict[str, dict[str, object]] = {group: {} for group in _GROUPS}
        for keyword, flag in flags_of(_GROUPS).items():
            value = getattr(args, keyword, None)
            if value is not None:
                stated[flag.group][flag.item.name] = flag.checked(value)
        return cls(**{group: config(**stated[group]) for group, config in _GROUPS.items()})


# The concern → its class; the first is the name of the field here, and of the heading in --help.
_GROUPS: dict[str, type] = {
    item.name: item.default_factory  # type: ignore[misc]
    for item in dataclasses.fields(ServerConfig)
}
