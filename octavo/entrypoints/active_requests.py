"""The generations under way: each ends when its client goes away, and all can be waited for or ended.

Every generation, streamed or not, runs through ``ActiveRequests.run``, so that no route can forget to stop work that
nobody waits for any more.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

__all__ = ["ActiveRequests"]

_T = TypeVar("_T")


class ActiveRequests:
    """Attributes:

    ended_by: what all requests have been ended with; from then on no other is let in.
    """

    def __init__(self) -> None:
        self.ended_by: Exception | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, _T], receive: Receive) -> _T:
        """Does the work of one request.

        Args:
            work: cancelled if the client goes away.
            receive: the request's ASGI channel; its body has been read.

        Raises:
            ClientDisconnect: the client went away first.
            Exception: ``ended_by``, or what the work raises.
        """
        if self.ended_by is not None:
            work.close()
            raise self.ended_by
        task = asyncio.create_task(work)
        watcher = asyncio.create_task(_cancel_at_disconnect(task, receive))
        self._tasks.add(task)
        self._idle.clear()
        try:
            return await task
        except asyncio.CancelledError:
            if watcher.done():
                raise ClientDisconnect from None
            if self.ended_by is not None:
                raise self.ended_by from None
            raise
        finally:
            watcher.cancel()
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    def end_all(self, error: Exception) -> None:
        """Ends every request with ``error``, and all that come later."""
        if self.ended_by is None:
            self.ended_by = error
        for task in self._tasks:
            task.cancel()

    async def wait_idle(self, timeout: float) -> bool:
        """Whether all requests have ended within ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return self._idle.is_set()
        return True


async def _cancel_at_disconnect(task: asyncio.Task[Any], receive: Receive) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    finally:
        task.cancel()
