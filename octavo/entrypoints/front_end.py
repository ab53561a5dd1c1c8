"""A front end: one event loop's app and HTTP server, over an engine that it has started or joined.

What it does not know: processes, signals, and how many of its kind there are.
"""

import asyncio
import gc
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from octavo.config import ServerConfig
from octavo.engine import AsyncLLM
from octavo.entrypoints.api_server import build_app
from octavo.entrypoints.errors import UnavailableError
from octavo.entrypoints.http_server import HttpServer
from octavo.entrypoints.server_state import ServerState
from octavo.errors import EngineDeadError
from octavo.metrics import MetricsFolder
from octavo.renderers import ChatRenderer

__all__ = ["FrontEnd"]

# So many make the garbage collector look for cycles among them; a step of many streams makes thousands that have none.
_NEW_OBJECTS = 2_000
# What streams and connections get to write their last words.
_LAST_WORDS_SECONDS = 1.5


class FrontEnd:
    """Serves on a socket from ``listen`` on, requests from ``load`` on.

    Args:
        config: the server's settings.
        chat_template: instead of the model's own.
        sock: bound; need not listen yet.
        shared_dir: private folder of all front ends of the server; None: this is the only one.
        metrics_folder: where the front ends' numbers meet; None: it is alone.

    Attributes:
        state: what the routes see.
        hurried: set when running requests are not to be waited for any more.
    """

    def __init__(
        self,
        config: ServerConfig,
        chat_template: str | None,
        sock: socket.socket,
        shared_dir: Path | None,
        metrics_folder: MetricsFolder | None,
    ) -> None:
        self.state = ServerState(config, shared_dir, metrics_folder)
        self.hurried = asyncio.Event()
        self._chat_template = chat_template
        self._socket = sock
        app = build_app(self.state)
        self._http = HttpServer(app, config, app.on_refused)
        self._http_task: asyncio.Task[None] | None = None
        self._side_tasks: list[asyncio.Task[None]] = []

    def listen(self) -> "asyncio.Task[None]":
        """Takes connections from now on. The task ends with ``end``, or because it cannot go on."""
        self._http_task = asyncio.create_task(self._http.serve(sockets=[self._socket]), name="http")
        return self._http_task

    async def load(self, engine: AsyncLLM) -> None:
        """Starts or joins the engine; returns when requests are taken.

        Raises:
            EngineDeadError, ConfigError, ModelError: see AsyncLLM.ready; the chat template is not valid.
        """
        engine.start()
        self.state.engine = engine
        if self.state.beats is not None:
            self._begin(self.state.beats.run())
        if self._chat_template is not None:  # found wrong now, not when gigabytes of weights have been read
            await asyncio.to_thread(lambda: ChatRenderer(engine.tokenizer, self._chat_template))
        await engine.ready()
        self.state.attach(engine, self._chat_template)
        if self.state.refresh_access is not None:
            self._begin(self.state.refresh_access(engine.config.scheduler.policy))
        gc.collect()
        gc.freeze()  # what is there now stays: no collection is to walk through it again
        gc.set_threshold(_NEW_OBJECTS)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._side_tasks.append(asyncio.create_task(work))

    async def drain(self, timeout: float) -> None:
        """No new request is let in; returns when those that run have ended, after ``timeout`` seconds, or hurried."""
        self.state.draining = True
        idle = asyncio.create_task(self.state.active.wait_idle(timeout))
        hurried = asyncio.create_task(self.hurried.wait())
        try:
            await asyncio.wait((idle, hurried), return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
            hurried.cancel()

    def refuse_all(self) -> None:
        """Ends what still runs, because the server goes down."""
        error = UnavailableError("the server is shutting down; the request was ended before it was done")
        self.state.active.end_all(error)

    def engine_died(self) -> None:
        """Ends what still runs, because the engine is gone."""
        self.state.active.end_all(EngineDeadError("the engine has died"))

    async def end(self) -> None:
        """Lets everyone have the last words that are under way, then closes all connections."""
        for task in self._side_tasks:
            task.cancel()
        await self.state.active.wait_idle(_LAST_WORDS_SECONDS)
        self._http.should_exit = True
        if self._http_task is None:
            return
        done, _ = await asyncio.wait((self._http_task,), timeout=_LAST_WORDS_SECONDS)
        if not done:
            # Clients that do not read: what is to be written to them can wait for ever.
            self._http.abort_connections()
            await asyncio.wait((self._http_task,))
