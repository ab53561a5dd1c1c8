"""The Jinja environment of chat templates: immutable, without access to Python, bounded in time and size.

Every way in which a template makes a string longer (operators, concatenation, captured blocks, filters, calls) passes a
size check. Time is bounded by running a template in a thread of its own, which is interrupted when it is late.
"""

import ctypes
import functools
import json
import re
import threading
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["MAX_CHARS", "TemplateLimitError", "TemplateRefusalError", "TemplateSandbox", "run_bounded"]

_T = TypeVar("_T")

MAX_CHARS = 1 << 22  # of any string that a template makes; also its longest list
MAX_NUMBER = 1_000_000  # largest whole number that a call or a filter may be given (widths, counts)
MAX_SECONDS = 5.0
# A width of 100,000 and more, or one taken from an argument.
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{6,}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*\d{6,}")


class TemplateLimitError(Exception):
    """The template asked for more time or memory than it may have."""


class TemplateRefusalError(Exception):
    """The template called ``raise_exception``: it does not take these messages."""


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's part for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CheckedConcat(CodeGenerator):
    """Compiles ``a ~ b`` to a call that checks the size."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (the base class's name)
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """With the globals and settings that Hugging Face chat templates are written for."""

    code_generator_class = _CheckedConcat
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag])
        self.filters = {name: _checked(function) for name, function in self.filters.items()}
        self.filters["tojson"] = _tojson
        self.filters["join"] = _join
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins a block's pieces; Jinja calls it for macros and captured blocks too."""
        pieces, size = [], 0
        for piece in parts:
            size += len(piece)
            if size > MAX_CHARS:
                raise TemplateLimitError(f"the chat template makes a text of more than {MAX_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_is_small(left, 1 << 64) and _is_small(right, 64)):
            raise TemplateLimitError("the chat template computes a power that is too large")
        if operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(count, int) and len(sized) * count > MAX_CHARS:
                    raise TemplateLimitError(f"the chat template repeats something beyond {MAX_CHARS} items")
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
                raise TemplateLimitError("the chat template computes a number that is too large")
        if operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise TemplateLimitError("the chat template formats to a width that is too large")
        return _sized(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, kwargs)
        return _sized(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and _WIDE_BRACES.search(owner):
            raise TemplateLimitError("the chat template formats to a width that is too large")
        return super().wrap_str_format(value)


def run_bounded(render: Callable[[], _T], seconds: float = MAX_SECONDS) -> _T:
    """``render()`` in a thread of its own; what it raises is raised here.

    Raises:
        TemplateLimitError: it took longer than ``seconds``. Its thread is interrupted at its next Python operation.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(render())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="chat-template", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TemplateLimitError))
        raise TemplateLimitError(f"the chat template takes longer than {seconds:g} seconds")
    if errors:
        raise errors[0]
    return results[0]


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with bounded arguments and a bounded result. ``wraps`` keeps Jinja's marks on it."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, kwargs)
        if function is do_format and isinstance(args[0], str) and _WIDE_PERCENT.search(args[0]):
            raise TemplateLimitError("the chat template formats to a width that is too large")
        return _sized(function(*args, **kwargs))

    return checked


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, int) and not _is_small(argument, MAX_NUMBER):
            raise TemplateLimitError(f"the chat template asks for {str(argument)[:20]} of something")


def _is_small(number: Any, bound: int) -> bool:
    return isinstance(number, int | float) and -bound <= number <= bound


def _sized(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict) and len(value) > MAX_CHARS:
        raise TemplateLimitError(f"the chat template makes something of more than {MAX_CHARS} characters or items")
    return value


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As Hugging Face defines it: no HTML escaping, non-ASCII text as it is."""
    if indent is not None and not _is_small(indent, 100):
        raise TemplateLimitError("the chat template indents by more than 100")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return str(_sized(text))


def _join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's ``join``, without automatic escaping and with its size known beforehand."""
    entries = [item[attribute] for item in value] if attribute is not None else list(value)
    texts = [str(entry) for entry in entries]
    if sum(map(len, texts)) + len(d) * len(texts) > MAX_CHARS:
        raise TemplateLimitError(f"the chat template makes a text of more than {MAX_CHARS} characters")
    return d.join(texts)


def _raise_exception(message: Any) -> None:
    raise TemplateRefusalError(str(message)[:500])


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:100])
