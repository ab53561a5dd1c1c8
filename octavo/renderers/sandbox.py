"""The Jinja environment of chat templates: immutable, without access to Python, bounded in time and size.

Every way in which a template makes something larger (operators, slices, concatenation, captured blocks, filters, calls)
passes a size check, and nothing is made while a template is compiled. Time is bounded by running a template in a thread
of its own, which is interrupted when it is late.
"""

import ctypes
import functools
import json
import threading
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.renderers.bounds import (
    MAX_CHARS,
    TemplateLimitError,
    check_arguments,
    check_printable,
    check_text_method,
    counted,
    is_small,
)

__all__ = ["TemplateRefusalError", "TemplateSandbox", "run_bounded"]

_T = TypeVar("_T")

MAX_SECONDS = 5.0
# Filters that hand items on as they are; all others may print what they are given.
_STRUCTURAL = {
    *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list"),
    *("map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort"),
    "unique",
}
# Those whose result can be the product of two sizes, by the name of the text method that does the same.
_MULTIPLYING = {"format": "%", "indent": "indent", "replace": "replace", "wordwrap": "wordwrap"}


class TemplateRefusalError(Exception):
    """The template called ``raise_exception``: it does not take these messages."""


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's part for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CheckedCode(CodeGenerator):
    """Compiles ``a ~ b`` and ``a[b:c]`` to calls that check the size, and works out nothing beforehand."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (the base class's name)
        self.write("environment.concat(map(environment.text_of, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.counted(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


def _printable(value: Any) -> Any:
    check_printable(value)
    return value


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """With the globals and settings that Hugging Face chat templates are written for."""

    code_generator_class = _CheckedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    counted = staticmethod(counted)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_printable,
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.filters = {name: _checked(name, function) for name, function in self.filters.items()}
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
        return str(counted("".join(pieces)))

    @staticmethod
    def text_of(value: Any) -> str:
        """A value, printed."""
        return str(_printable(value))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (is_small(left, 1 << 64) and is_small(right, 64)):
            raise TemplateLimitError("the chat template computes a power that is too large")
        if operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(count, int) and len(sized) * count > MAX_CHARS:
                    raise TemplateLimitError(f"the chat template repeats something beyond {MAX_CHARS} items")
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
                raise TemplateLimitError("the chat template computes a number that is too large")
        if operator == "%" and isinstance(left, str):
            check_text_method("%", left, (right,), {})
        return counted(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        check_arguments(args, kwargs)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            check_text_method(function.__name__, owner, args, kwargs)
        return counted(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, name = value.__self__, value.__name__

        def formatted(*args: Any, **kwargs: Any) -> str:
            check_text_method(name, text, args, kwargs)
            return wrapped(*args, **kwargs)

        return formatted


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


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with bounded arguments and a bounded result. ``wraps`` keeps Jinja's marks on it."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_arguments(args, kwargs)
        if name == "sum" and not all(is_small(start, MAX_CHARS) for start in (*args[3:], *_only(kwargs, "start"))):
            raise TemplateLimitError("the chat template adds up more than numbers")
        # Of what Jinja passes beside them, the environment among others, nothing is printed.
        data = [argument for argument in args if isinstance(argument, str | int | float | list | tuple | dict)]
        if name in _MULTIPLYING and data:
            check_text_method(_MULTIPLYING[name], str(_printable(data[0])), tuple(data[1:]), kwargs)
        elif name not in _STRUCTURAL:
            check_printable(data)
        return counted(function(*args, **kwargs))

    return checked


def _only(kwargs: dict[str, Any], name: str) -> list[Any]:
    return [kwargs[name]] if name in kwargs else []


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As Hugging Face defines it: no HTML escaping, non-ASCII text as it is."""
    if indent is not None and not is_small(indent, 100):
        raise TemplateLimitError("the chat template indents by more than 100")
    check_printable(value)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return str(counted(text))


def _join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's ``join``, without automatic escaping and with its size known beforehand."""
    entries = [item[attribute] for item in value] if attribute is not None else list(value)
    check_printable(entries)
    texts = [str(entry) for entry in entries]
    if sum(map(len, texts)) + len(d) * len(texts) > MAX_CHARS:
        raise TemplateLimitError(f"the chat template makes a text of more than {MAX_CHARS} characters")
    return d.join(texts)


def _raise_exception(message: Any) -> None:
    raise TemplateRefusalError(str(message)[:500])


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:100])
