"""Signals that arrive before there is anybody to act on them."""

import signal  # and nothing else: what is imported before they are held is where they can be lost

__all__ = ["EndingSignalsHeld"]

_ENDING = (signal.SIGTERM, signal.SIGINT)


class EndingSignalsHeld:
    """A context in which SIGTERM and SIGINT wait. A Python handler that raises can be lost: there are places in
    libraries, and in the interpreter while it imports, where an exception goes nowhere."""

    def __enter__(self) -> "EndingSignalsHeld":
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        return self

    def __exit__(self, *_: object) -> None:
        """Lets them through, to whoever was there before."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def take(self) -> int | None:
        """The signal that has come and waits, which then does so no more."""
        return signal.sigwait(_ENDING) if signal.sigpending() & set(_ENDING) else None
