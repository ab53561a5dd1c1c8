"""What an executor's call gives: a result that may still have to come. A Future is one, and costs much more than a
step that is over already should pay."""

from typing import Generic, Protocol, TypeVar

__all__ = ["Done", "Pending"]

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Pending(Protocol[R_co]):
    """The part of ``concurrent.futures.Future`` that whoever waits for a result needs."""

    def result(self, timeout: float | None = None) -> R_co:
        """Waits for the result; raises what the call raised."""
        ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits, too: what the call raised, or None."""
        ...

    def done(self) -> bool: ...


class Done(Generic[R]):
    """The result of a call that is over.

    Args:
        value: what it returned. Nobody gets to see it if it raised ``error``.
    """

    __slots__ = ("_error", "_value")

    def __init__(self, value: R, error: Exception | None = None) -> None:
        self._value = value
        self._error = error

    def result(self, timeout: float | None = None) -> R:
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._error

    def done(self) -> bool:
        return True
