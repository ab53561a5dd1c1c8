"""The further front ends of a server, as its first process sees them."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

from octavo.config import OctavoConfig, ServerConfig
from octavo.engine import ChildProcess, FrontEndSlot, describe_exit
from octavo.entrypoints.orders import Drain, EngineGone, FrontEndLaunch, Hurry, Order, encode_order

__all__ = ["FurtherFrontEnds"]

_MODULE = "octavo.entrypoints.front_end_proc"


class FurtherFrontEnds:
    """Starts a process for each socket; used from an event loop. None at all is fine.

    Args:
        sockets: bound; one for each, which is closed here: what would be left of it when its process has ended takes
            connections that nobody accepts.
        socket_dir: the server's private folder.

    Attributes:
        failure: done when one has ended that was not told to, or badly, with what is to be said of it.
        hung: after ``end``, those that did not end when they were told to.
    """

    def __init__(self, sockets: Sequence[socket.socket], socket_dir: Path | None) -> None:
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[str] = self._loop.create_future()
        self.hung: list[str] = []
        self._ending = self._closed = False
        self._fds = [sock.fileno() for sock in sockets]
        self._socket_dir = socket_dir
        self._children: list[ChildProcess] = []
        self._running: set[int] = set()
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        for index, sock in enumerate(sockets, start=1):
            self._children.append(child := ChildProcess(_MODULE, socket_dir, pass_fds=(sock.fileno(),)))
            sock.close()
            self._running.add(index)
            self._all_gone.clear()
            child.on_exit(lambda code, index=index: self._on_exit(index, code))  # type: ignore[misc]

    def launch(self, config: OctavoConfig, server: ServerConfig, chat_template: str | None) -> None:
        """Tells them what to serve."""
        for index, (child, fd) in enumerate(zip(self._children, self._fds, strict=True), start=1):
            slot = FrontEndSlot(index=index, count=len(self._children) + 1, socket_dir=str(self._socket_dir))
            launch = FrontEndLaunch(config=config, server=server, chat_template=chat_template, slot=slot, socket_fd=fd)
            child.send(encode_order(launch))

    def drain(self, timeout: float) -> None:
        """They let their requests finish, for so many seconds at most, and end."""
        self._tell(Drain(timeout))

    def hurry(self) -> None:
        """They end now."""
        self._tell(Hurry())

    def engine_is_gone(self, cause: str) -> None:
        """They tell their clients, and end."""
        self._tell(EngineGone(cause))

    def _tell(self, order: Order) -> None:
        self._ending = True
        for child in self._children:
            child.send(encode_order(order))

    async def wait(self, timeout: float | None = None) -> None:
        """Returns when all have ended, or after ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._all_gone.wait(), timeout)
        except TimeoutError:
            return

    async def end(self, timeout: float) -> None:
        """Returns when all are gone. Those that have been told to end get ``timeout`` seconds for it."""
        if self._ending:
            await self.wait(timeout)
        self._closed = True
        late = self._running if self._ending else frozenset()
        for index, child in enumerate(self._children, start=1):
            if child.kill() and index in late:
                self.hung.append(f"front end {index}")

    def _on_exit(self, index: int, exit_code: int) -> None:
        """In a thread of that child's own."""
        self._loop.call_soon_threadsafe(self._note_exit, index, exit_code)

    def _note_exit(self, index: int, exit_code: int) -> None:
        self._running.discard(index)
        if not self._running:
            self._all_gone.set()
        if not self._closed and (exit_code != 0 or not self._ending) and not self.failure.done():
            self.failure.set_result(describe_exit(f"front end {index}", exit_code))
