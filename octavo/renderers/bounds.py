"""How much a chat template may make: of one thing, and in one run altogether.

Sizes are looked at before something is made, wherever a few characters can ask for many; what is made counts towards
the run, whether it is kept or not. A run has a thread of its own, so the count is the thread's.
"""

import re
import threading
from collections.abc import Mapping
from typing import Any

__all__ = [
    "MAX_CHARS",
    "TemplateLimitError",
    "check_arguments",
    "check_printable",
    "check_text_method",
    "counted",
    "is_small",
]

MAX_CHARS = 1 << 22  # of any string that a template makes; also its longest list
MAX_TOTAL_CHARS = 1 << 26  # of all that it makes in one run
MAX_NUMBER = 1_000_000  # largest whole number that a call or a filter may be given (widths, counts)
_CHARS_AN_ITEM = 8  # an item of a list is worth so many characters of a string
# A width of 100,000 and more, or one taken from an argument.
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{6,}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*\d{6,}")


class TemplateLimitError(Exception):
    """The template asked for more time or memory than it may have."""


class _Run(threading.local):
    num_chars = 0


_run = _Run()


def counted(value: Any) -> Any:
    """``value``, if it is not too large, and not too much with all that was made before.

    Raises:
        TemplateLimitError: it is.
    """
    if not isinstance(value, str | bytes | list | tuple | dict):
        return value
    size = len(value)
    if size > MAX_CHARS:
        raise TemplateLimitError(f"the chat template makes something of more than {MAX_CHARS} characters or items")
    _run.num_chars += size if isinstance(value, str | bytes) else size * _CHARS_AN_ITEM
    if _run.num_chars > MAX_TOTAL_CHARS:
        raise TemplateLimitError(f"the chat template makes more than {MAX_TOTAL_CHARS} characters altogether")
    return value


def check_printable(value: Any) -> int:
    """Characters that a value has when it is printed, roughly; TemplateLimitError if they are more than MAX_CHARS.

    A list may hold one long string many times.
    """
    if isinstance(value, str):
        return len(value)
    num_chars, unseen = 0, [value]
    while unseen:
        item = unseen.pop()
        num_chars += len(item) if isinstance(item, str) else 1
        if num_chars > MAX_CHARS:
            raise TemplateLimitError(f"the chat template prints something of more than {MAX_CHARS} characters")
        if isinstance(item, Mapping):
            unseen += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            unseen += item
    return num_chars


def check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses numbers that nothing in a prompt needs."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, int) and not is_small(argument, MAX_NUMBER):
            raise TemplateLimitError(f"the chat template asks for {str(argument)[:20]} of something")


def is_small(number: Any, bound: int) -> bool:
    return isinstance(number, int | float) and -bound <= number <= bound


def check_text_method(name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A method of ``text``, or a filter of the same name, or ``%``, whose result can be the product of two sizes."""
    given = [*args, *kwargs.values()]
    sizes = [check_printable(argument) for argument in given]
    longest = max(sizes, default=0)
    if name == "replace":
        times = text.count(given[0]) if given and isinstance(given[0], str) else len(text)
    elif name == "join":
        longest, times = len(text), longest
    elif name in ("format", "format_map"):
        _check_width(_WIDE_BRACES, text)
        times = text.count("{")
    elif name == "%":
        _check_width(_WIDE_PERCENT, text)
        times = text.count("%")
    elif name == "expandtabs":
        longest, times = _width(given, 8), text.count("\t")
    elif name == "indent":
        longest, times = max(longest, _width(given, 4)), text.count("\n") + 1
    elif name == "wordwrap":
        times = len(text)
    elif name == "translate":
        raise TemplateLimitError("the chat template calls translate, which may make far more than it is given")
    else:
        return
    if longest * times + len(text) > 4 * MAX_CHARS:
        raise TemplateLimitError(f"the chat template makes something of more than {MAX_CHARS} characters or items")


def _width(given: list[Any], default: int) -> int:
    return max((abs(value) for value in given if isinstance(value, int)), default=default)


def _check_width(wide: re.Pattern[str], text: str) -> None:
    if wide.search(text):
        raise TemplateLimitError("the chat template formats to a width that is too large")
