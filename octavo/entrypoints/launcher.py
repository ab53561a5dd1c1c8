"""The life of the server process: listen, load, serve, drain, end; and how each kind of end is told.

The port is open from the first moment, so that probes see the loading. Exit codes: 0 after SIGTERM or SIGINT; 128 plus
the signal's number if it came before the server was ready; ConfigError, ModelError and EngineDeadError are for the
caller to tell.
"""

import asyncio
import contextlib
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import uvloop

from octavo.config import EngineArgs, ServerConfig
from octavo.engine import AsyncLLM, build_config
from octavo.entrypoints.api_server import build_app
from octavo.entrypoints.errors import UnavailableError
from octavo.entrypoints.http_server import HttpServer
from octavo.entrypoints.listen import listen, url_of
from octavo.entrypoints.server_state import ServerState
from octavo.errors import ConfigError, EngineDeadError, ModelError
from octavo.logging import init_logger
from octavo.renderers import ChatRenderer

__all__ = ["serve"]

logger = init_logger(__name__)

_T = TypeVar("_T")

_CLASS_NAME = re.compile(r"^\w+Error: ")

_PROGRESS_SECONDS = 0.25
_LINE_SECONDS = 2.0
# What streams and connections get to write their last words.
_LAST_WORDS_SECONDS = 1.5


def serve(engine_args: EngineArgs, config: ServerConfig) -> int:
    """Runs a server until it is told to end; returns the exit code.

    Raises:
        ConfigError, ModelError: it cannot start as configured.
        EngineDeadError: the engine has died.
    """
    with contextlib.closing(listen(config.http.host, config.http.port)) as sock:
        file = config.answer.chat_template
        chat_template = None if file is None else _read_template(Path(file))
        server = _ServerProcess(engine_args, config, sock, chat_template)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(server.run())


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--chat-template {path} cannot be read: {reason}") from None


class _ServerProcess:
    def __init__(
        self, engine_args: EngineArgs, config: ServerConfig, sock: socket.socket, chat_template: str | None
    ) -> None:
        self._engine_args = engine_args
        self._config = config
        self._socket = sock
        self._url = url_of(sock)
        self._chat_template = chat_template
        self._state = ServerState(config)
        self._engine: AsyncLLM | None = None
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._hurried = asyncio.Event()  # by a second signal

    async def run(self) -> int:
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signum)
        http = HttpServer(build_app(self._state), self._config)
        http_task = asyncio.create_task(http.serve(sockets=[self._socket]), name="http")
        engine_task = asyncio.create_task(self._run_engine(), name="engine")
        signal_task = asyncio.create_task(self._signalled.wait(), name="signal")
        try:
            await asyncio.wait((http_task, engine_task, signal_task), return_when=asyncio.FIRST_COMPLETED)
            if engine_task.done():
                self._state.active.end_all(EngineDeadError("the engine has died"))
                engine_task.result()
            if http_task.done():
                http_task.result()
                raise RuntimeError("the HTTP server has ended by itself")
            if self._state.services is None:
                return 128 + self._signals[0]
            await self._drain(engine_task)
            return 0
        finally:
            signal_task.cancel()
            await self._state.active.wait_idle(_LAST_WORDS_SECONDS)
            await self._end_http(http, http_task)
            if self._engine is not None:
                self._engine.shutdown()  # which lets engine_task end too
            else:
                engine_task.cancel()
            await asyncio.gather(http_task, engine_task, signal_task, return_exceptions=True)

    def _on_signal(self, signum: int) -> None:
        self._signals.append(signum)
        (self._hurried if self._signalled.is_set() else self._signalled).set()

    # ---- the engine -------------------------------------------------------------------------------------------------

    async def _run_engine(self) -> None:
        """Loads the engine, serves, and raises the cause when it is gone."""
        say(f"octavo is loading; it will serve on {self._url}")
        reporter = asyncio.create_task(self._report_progress())
        try:
            config = await _in_daemon_thread(lambda: build_config(self._engine_args, self._on_progress))
            self._engine = engine = AsyncLLM(config)
            engine.start()
            if self._chat_template is not None:  # found wrong now, not when gigabytes of weights have been read
                await asyncio.to_thread(lambda: ChatRenderer(engine.tokenizer, self._chat_template))
            await engine.ready()
        except EngineDeadError as error:
            if self._engine is not None and self._engine.exit_code_hint == 1:
                # It did not die: it could not be loaded as configured. The class is of no interest to a user.
                raise ModelError(_CLASS_NAME.sub("", str(error))) from None
            raise
        finally:
            reporter.cancel()
        self._state.attach(engine, self._chat_template)
        say(f"Octavo is ready: {self._url} ({self._facts(engine)})")
        raise await engine.wait_dead()

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
        num_tokens = ready.num_kv_blocks * ready.block_size
        return (
            f"model {model.served_model_name[0]}, max_model_len {model.max_model_len}, KV cache {num_tokens} tokens, "
            f"loaded in {ready.load_seconds:.1f} s"
        )

    # ---- the end ----------------------------------------------------------------------------------------------------

    async def _end_http(self, http: HttpServer, http_task: "asyncio.Task[None]") -> None:
        http.should_exit = True
        done, _ = await asyncio.wait((http_task,), timeout=_LAST_WORDS_SECONDS)
        if not done:
            # Clients that do not read: what is to be written to them can wait for ever.
            http.abort_connections()
            await asyncio.wait((http_task,))

    async def _drain(self, engine_task: asyncio.Task[None]) -> None:
        """Lets running requests finish, as long as they may. The engine's death meanwhile is raised."""
        state, timeout = self._state, self._config.http.shutdown_timeout
        state.draining = True
        if len(state.active) and timeout > 0:
            requests = "1 running request" if len(state.active) == 1 else f"{len(state.active)} running requests"
            say(f"shutting down: waiting up to {timeout:g} s for {requests}; send the signal again to end now")
            idle = asyncio.create_task(state.active.wait_idle(timeout))
            hurried = asyncio.create_task(self._hurried.wait())
            await asyncio.wait((idle, hurried, engine_task), return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
            hurried.cancel()
            if engine_task.done():
                state.active.end_all(EngineDeadError("the engine has died"))
                engine_task.result()
        state.active.end_all(UnavailableError("the server is shutting down; the request was ended before it was done"))


def say(line: str) -> None:
    """A line for whoever started the server."""
    print(line, file=sys.stderr, flush=True)


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
