"""Log lines: one format, to stderr, safe against forged lines (control characters are escaped)."""

import logging
import sys

from octavo import envs

__all__ = ["init_logger", "one_line"]

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


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Looks up ``sys.stderr`` at each record, so that redirected and captured streams are honoured."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_LineFormatter(_FORMAT, datefmt="%H:%M:%S"))

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
