"""A config field that is also a command line flag: one declaration for both."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

__all__ = ["option"]


def option(
    help: str,
    *,
    default: Any = None,
    flag: str | None = None,
    short: str | None = None,
    choices: tuple[str, ...] | None = None,
    refused: Mapping[str, str] | None = None,
    metavar: str | None = None,
    least: float | None = None,
    most: float | None = None,
    secret: bool = False,
    unstated: tuple[Any, ...] = (),
) -> Any:
    """A dataclass field whose metadata the command line is made from.

    Args:
        help: one line for ``--help``.
        default: value of the final config where nothing was stated; None where resolve.py chooses one.
        flag: flag name without dashes, where it is not the field's name.
        short: another name of the flag, with its dash.
        choices: the values that are allowed.
        refused: values that people know from elsewhere → why octavo does not have them.
        metavar: what stands for the value in ``--help``; SECONDS is a unit, too.
        unstated: values that say no more than leaving the option out.
        least, most: bounds of a number, both allowed; infinity and NaN are not. Every number has them.
        secret: the value is not to be shown where the config is.
    """
    stated = {
        "help": help,
        "flag": flag,
        "short": short,
        "choices": choices,
        "refused": refused,
        "metavar": metavar,
        "least": least,
        "most": most,
        "unstated": unstated,
    }
    if default in ([], {}):
        return field(default_factory=type(default), metadata=stated, repr=not secret)
    return field(default=default, metadata=stated, repr=not secret)
