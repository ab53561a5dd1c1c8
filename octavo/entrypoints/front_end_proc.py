"""A further front end in a process of its own: ``python -m octavo.entrypoints.front_end_proc``.

It shares the port and the engine with the first one, lives as long as its standard input is open, and ends when it is
told to, when the engine dies, or when it fails: which is the end of the whole server. Its clients are told, also when
it is the first process that has gone.
"""

import asyncio
import contextlib
import logging
import os
import queue
import socket
import threading
from pathlib import Path
from typing import NoReturn

import uvloop

from octavo.engine import AsyncLLM, LifeLine
from octavo.entrypoints.front_end import FrontEnd
from octavo.entrypoints.orders import Drain, EngineGone, FrontEndLaunch, Hurry, Order, decode_order
from octavo.errors import EngineDeadError
from octavo.logging import init_logger, one_line
from octavo.metrics import MetricsFolder

__all__: list[str] = []  # nothing is imported from here

logger = init_logger("octavo.entrypoints.front_end_proc")  # the process runs this module as __main__

_EXIT_DIED = 3
# Until it is ended by force, where the first process is gone: all of the server is to be gone within five.
_LAST_WORDS_SECONDS = 4.0


class _FrontEndProc:
    """What is done with the orders. ``run`` is its whole life, and gives the exit code."""

    def __init__(self, launch: FrontEndLaunch, orders: "queue.SimpleQueue[Order]") -> None:
        self._orders = orders
        slot, sock = launch.slot, socket.socket(fileno=launch.socket_fd)
        assert slot.socket_dir is not None
        shared_dir = Path(slot.socket_dir)
        folder = MetricsFolder(shared_dir, slot.index, slot.count)
        self._front_end = FrontEnd(launch.server, launch.chat_template, sock, shared_dir, folder)
        self._engine = AsyncLLM(launch.config, slot=slot, metrics_folder=folder)
        self._drain = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._take_orders, args=(loop,), name="orders", daemon=True).start()
        serving = asyncio.create_task(self._serve())
        try:
            await asyncio.wait((serving, self._drain), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            await self._front_end.drain(self._drain.result())
            if serving.done():
                serving.result()
            self._front_end.refuse_all()
            return 0
        except EngineDeadError:
            self._front_end.engine_died()
            return _EXIT_DIED
        finally:
            serving.cancel()
            await self._front_end.end()

    async def _serve(self) -> None:
        await self._front_end.load(self._engine)
        http = self._front_end.listen()
        dead = asyncio.create_task(self._engine.wait_dead())
        await asyncio.wait((http, dead), return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            self._front_end.hurried.set()
            raise dead.result()
        http.result()
        raise RuntimeError("the HTTP server has ended by itself")

    def _take_orders(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread; ends with the process."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            while True:
                loop.call_soon_threadsafe(self._obey, self._orders.get())

    def _obey(self, order: Order) -> None:
        if isinstance(order, Drain) and not self._drain.done():
            self._drain.set_result(order.timeout)
        elif isinstance(order, Hurry):
            self._front_end.hurried.set()
        elif isinstance(order, EngineGone):
            self._engine.engine_is_gone(order.cause)


async def _run(launch: FrontEndLaunch, orders: "queue.SimpleQueue[Order]") -> int:
    return await _FrontEndProc(launch, orders).run()


def main() -> NoReturn:
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    LifeLine(
        lambda message: orders.put(decode_order(message)),
        logger,
        on_end=lambda: orders.put(EngineGone("the first process of the server is gone")),
        last_words_seconds=_LAST_WORDS_SECONDS,
    )
    launch = orders.get()
    if not isinstance(launch, FrontEndLaunch):  # the server ends before there was anything to serve
        os._exit(0)
    exit_code = _EXIT_DIED
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            exit_code = runner.run(_run(launch, orders))
    except Exception as error:
        if not Path(launch.slot.socket_dir or "").is_dir():  # somebody has died, and who noticed it first says so
            os._exit(_EXIT_DIED)
        logger.error("front end failed: %s", one_line(f"{type(error).__name__}: {error}"), exc_info=error)
    logging.shutdown()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
