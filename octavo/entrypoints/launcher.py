"""The life of the server process: listen, load, serve, drain, end; and how each kind of end is told.

The port is open from the first moment, so that probes see the loading. Exit codes: 0 after SIGTERM or SIGINT; 128 plus
the signal's number if it came before the server was ready; ConfigError, ModelError and EngineDeadError are for the
caller to tell.
"""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import uvloop

from octavo.config import EngineArgs, ServerConfig
from octavo.engine import AsyncLLM, FrontEndSlot, build_config
from octavo.entrypoints.access import check_access
from octavo.entrypoints.front_end import FrontEnd
from octavo.entrypoints.front_ends import FurtherFrontEnds
from octavo.entrypoints.listen import listening, url_of
from octavo.entrypoints.loading import load_failure, read_chat_template
from octavo.entrypoints.service_manager import ServiceManager
from octavo.entrypoints.watch import EngineWatch
from octavo.errors import ConfigError, EngineDeadError
from octavo.logging import say
from octavo.metrics import MetricsFolder

__all__ = ["serve"]

_T = TypeVar("_T")

_PROGRESS_SECONDS = 0.25
_LINE_SECONDS = 2.0
# What other front ends get for their clients' last words.
_FRONT_ENDS_SECONDS = 4.0
# How much later than its consequences the cause of a death may be known.
_CAUSE_SECONDS = 1.0


def serve(engine_args: EngineArgs, config: ServerConfig, socket_dir: Path | None = None) -> int:
    """Runs a server until it is told to end; returns the exit code.

    Args:
        socket_dir: the private folder of the engine that was started early; None: the engine will be a thread.

    Raises:
        ConfigError, ModelError: it cannot start as configured.
        EngineDeadError: the engine, or another of its processes, has died.
    """
    http = config.http
    if http.api_server_count > 1 and socket_dir is None:
        raise ConfigError(
            "--api-server-count: with OCTAVO_ENABLE_MULTIPROCESSING=0 there is one process for everything"
        )
    with listening(http, socket_dir) as sockets:
        chat_template = read_chat_template(config.answer)
        check_access(config.access, engine_args.stated["scheduler"].get("policy", "fcfs"))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(_ServerProcess(engine_args, config, sockets, chat_template, socket_dir)))


async def _run(server: "_ServerProcess") -> int:
    return await server.run()


class _ServerProcess:
    def __init__(
        self,
        engine_args: EngineArgs,
        config: ServerConfig,
        sockets: list[socket.socket],
        chat_template: str | None,
        socket_dir: Path | None,
    ) -> None:
        self._engine_args = engine_args
        self._config = config
        self._sockets = sockets
        self._url = url_of(sockets[0], "http" if config.http.ssl_certfile is None else "https")
        self._chat_template = chat_template
        self._socket_dir = socket_dir
        self._metrics_folder = None
        if socket_dir is not None and len(sockets) > 1:
            self._metrics_folder = MetricsFolder(socket_dir, 0, len(sockets))
        self._front_end = FrontEnd(config, chat_template, sockets[0], socket_dir, self._metrics_folder)
        self._state = self._front_end.state
        self._engine: AsyncLLM | None = None
        self._said_ready = False
        self._manager = ServiceManager()
        self._signals: list[int] = []
        self._signalled = asyncio.Event()

    async def run(self) -> int:
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signum)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))  # held so far
        http_task = self._front_end.listen()
        self._others = others = FurtherFrontEnds(self._sockets[1:], self._socket_dir)
        engine_task = asyncio.create_task(self._run_engine(), name="engine")
        signal_task = asyncio.create_task(self._signalled.wait(), name="signal")
        try:
            await asyncio.wait(
                (http_task, engine_task, signal_task, others.failure), return_when=asyncio.FIRST_COMPLETED
            )
            await self._raise_failure(engine_task)
            if http_task.done():
                http_task.result()
                raise RuntimeError("the HTTP server has ended by itself")
            if self._state.services is None:
                return 128 + self._signals[0]
            await self._drain(engine_task)
        finally:
            signal_task.cancel()
            # Before the engine was ready nobody has clients, and who is still starting up hears nothing yet.
            others_time = 0.0 if self._state.services is None else _FRONT_ENDS_SECONDS
            await asyncio.gather(self._front_end.end(), others.end(others_time))
            if self._engine is not None:
                self._engine.shutdown()  # which lets engine_task end too
            else:
                engine_task.cancel()
            await asyncio.gather(http_task, engine_task, signal_task, return_exceptions=True)
        self._raise_hung()
        return 0 if self._said_ready else 128 + self._signals[0]

    def _raise_hung(self) -> None:
        """Raises, after a shutdown, if some process had to be killed for it."""
        assert self._engine is not None
        hung = list(self._others.hung) if self._engine.ended_well else ["the engine core process", *self._others.hung]
        if hung:
            cause = self._engine.pulse().cause
            because = f"; {cause}" if cause and not self._engine.ended_well else ""
            raise EngineDeadError(f"{' and '.join(hung)} did not end when it was told to, and was killed{because}")

    async def _raise_failure(self, engine_task: "asyncio.Task[None]") -> None:
        """Raises what is to be told if the engine or another front end has ended, after telling the clients."""
        failure = self._others.failure
        if failure.done() and not engine_task.done():
            # It may be that they ended because of the engine, whose cause then is the one to tell.
            await asyncio.wait((engine_task,), timeout=_CAUSE_SECONDS)
        if not engine_task.done() and not failure.done():
            return
        self._front_end.engine_died()
        cause = failure.result() if not engine_task.done() else str(engine_task.exception())
        self._others.engine_is_gone(cause)
        if engine_task.done():
            engine_task.result()
        raise EngineDeadError(cause)

    def _on_signal(self, signum: int) -> None:
        self._signals.append(signum)
        if self._signalled.is_set():
            self._front_end.hurried.set()
            self._others.hurry()
        self._signalled.set()

    # ---- the engine -------------------------------------------------------------------------------------------------

    async def _run_engine(self) -> None:
        """Loads the engine, serves, and raises the cause when it is gone."""
        say(f"octavo is loading; it will serve on {self._url}")
        watch = asyncio.create_task(EngineWatch(self._state, self._manager).run(), name="engine-watch")
        try:
            engine = await self._load_engine()
            if not self._signalled.is_set():  # who is told to end is not ready any more
                say(f"Octavo is ready: {self._url} ({self._facts(engine)})")
                self._said_ready = True
                self._manager.ready()
            raise await engine.wait_dead()
        finally:
            watch.cancel()

    async def _load_engine(self) -> AsyncLLM:
        reporter = asyncio.create_task(self._report_progress())
        try:
            config = await _in_daemon_thread(lambda: build_config(self._engine_args, self._on_progress))
            slot = FrontEndSlot(count=self._config.http.api_server_count)
            self._engine = engine = AsyncLLM(config, slot=slot, metrics_folder=self._metrics_folder)
            engine.start()
            loading = asyncio.create_task(self._front_end.load(engine))
            self._others.launch(config, self._config, self._chat_template)
            await loading
        except EngineDeadError as error:
            raise error if self._engine is None else load_failure(self._engine, error) from None
        finally:
            reporter.cancel()
        return engine

    def _on_progress(self, stage: str, share: float) -> None:
        self._state.stage, self._state.progress = stage, share

    async def _report_progress(self) -> None:
        """Keeps the probes informed, and the terminal: a line a stage, and every other second in a long one."""
        said_stage, said_at = "", 0.0
        while True:
            if self._engine is not None:
                self._on_progress(*self._engine.progress)
            stage, now = self._state.stage, asyncio.get_running_loop().time()
            if stage != said_stage or now - said_at >= _LINE_SECONDS:
                share = self._state.progress
                say(f"  {stage} {share:.0%}" if share else f"  {stage}")
                said_stage, said_at = stage, now
            await asyncio.sleep(_PROGRESS_SECONDS)

    def _facts(self, engine: AsyncLLM) -> str:
        model, ready = engine.config.model, engine.engine_ready
        assert ready is not None
        kv_cache = f"{ready.num_kv_blocks * ready.block_size} tokens in {engine.config.cache.kv_cache_dtype}"
        return (
            f"model {model.served_model_name[0]}, max_model_len {model.max_model_len}, KV cache {kv_cache}, "
            f"loaded in {ready.load_seconds:.1f} s"
        )

    # ---- the end ----------------------------------------------------------------------------------------------------

    async def _drain(self, engine_task: asyncio.Task[None]) -> None:
        """Lets running requests finish, as long as they may. The engine's death meanwhile is raised."""
        self._manager.stopping()
        timeout = self._config.http.shutdown_timeout
        num_running = len(self._state.active)
        if timeout > 0 and (num_running or len(self._sockets) > 1):
            requests = "running requests" if not num_running else f"{num_running} running requests"
            requests = "1 running request" if num_running == 1 else requests
            say(f"shutting down: waiting up to {timeout:g} s for {requests}; send the signal again to end now")
        self._others.drain(timeout)
        drained = asyncio.gather(self._drain_this(timeout), self._others.wait(timeout + _FRONT_ENDS_SECONDS))
        await asyncio.wait((drained, engine_task), return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        await self._raise_failure(engine_task)

    async def _drain_this(self, timeout: float) -> None:
        await self._front_end.drain(timeout)
        self._front_end.refuse_all()


async def _in_daemon_thread(call: Callable[[], _T]) -> _T:
    """The result of a call that may take minutes; a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True, name="octavo-config").start()
    return await future
