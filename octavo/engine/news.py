"""An event for one waiter: a third of an asyncio.Event's work, and there is one for every token of every stream."""

import asyncio

__all__ = ["News"]


class News:
    """Made and used on the running event loop.

    Attributes:
        told: there is something new; whoever takes it resets this.
    """

    __slots__ = ("_loop", "_waiter", "told")

    def __init__(self) -> None:
        self.told = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def tell(self) -> None:
        self.told = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def wait(self) -> "asyncio.Future[None]":
        """Done when ``tell`` is called the next time. Not a coroutine: that would be one more a token."""
        self._waiter = self._loop.create_future()
        return self._waiter
