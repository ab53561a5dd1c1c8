"""Signals that arrive before there is anybody to act on them."""

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["ending_signals_held"]


@contextlib.contextmanager
def ending_signals_held() -> Iterator[None]:
    """SIGTERM and SIGINT wait until an event loop has handlers for them, which lets them through. A Python handler that
    raises could be lost: there are places in libraries, and in the interpreter, where an exception goes nowhere."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
