"""A config field that is also a command line flag: one declaration for both."""

from dataclasses import field
from typing import Any

__all__ = ["option"]


def option(help: str, *, default: Any = None, flag: str | None = None, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field whose metadata the command line is made from.

    Args:
        help: one line for ``--help``.
        default: value of the final config where nothing was stated; None where resolve.py chooses one.
        flag: flag name without dashes, where it is not the field's name.
        choices: the values that are allowed.
    """
    return field(default=default, metadata={"help": help, "flag": flag, "choices": choices})
