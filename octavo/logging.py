"""Log lines to stderr, as text or as JSON, safe against forged lines (control characters are escaped)."""

import json
import logging
import os
import sys
import time

from octavo import envs

__all__ = ["init_logger", "one_line", "say", "set_log_format"]

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_ROOT = "octavo"
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, 0x85, 0x2028, 0x2029) if code != 9}


def one_line(text: str) -> str:
    """``text`` with control characters and line breaks escaped, so that user input cannot forge a log line."""
    return text.translate(_CONTROL)


class _LineFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the base class's name)
        record.message = one_line(record.message)
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    """An object a line. What a record has as ``fields`` stands beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        shown = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown | getattr(record, "fields", {}))


_FORMATTERS = {"text": _LineFormatter(_FORMAT, datefmt="%H:%M:%S"), "json": _JsonFormatter()}


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Looks up ``sys.stderr`` at each record, so that redirected and captured streams are honoured."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_FORMATTERS[envs.log_format()])

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def init_logger(name: str) -> logging.Logger:
    """The logger for a module (pass ``__name__``). Configures octavo's root logger on first use."""
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        root.addHandler(_StderrHandler())
        root.setLevel(envs.log_level())
        root.propagate = False
    return logging.getLogger(name)


def set_log_format(name: str) -> None:
    """All log lines of this process and of those that it starts from now on, as "text" or "json"."""
    os.environ[envs.LOG_FORMAT] = name
    for handler in logging.getLogger(_ROOT).handlers:
        if isinstance(handler, _StderrHandler):
            handler.setFormatter(_FORMATTERS[name])


def say(line: str, level: int = logging.INFO) -> None:
    """A line for whoever started this process: bare, where log lines are text."""
    if envs.log_format() == "json":
        init_logger(_ROOT).log(level, "%s", line)
    else:
        print(one_line(line), file=sys.stderr, flush=True)
