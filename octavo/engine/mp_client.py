"""Clients of an EngineCoreProc: SyncMPClient and AsyncMPClient, over two ZMQ sockets in a private folder.

Front end: binds a ROUTER (to the engine) and a PULL (from it) and starts the engine, which connects to both. The end
of the engine, however it comes, arrives as one more message on the PULL socket, so that waiting for outputs is waiting
for bad news too.
"""

import asyncio
import contextlib
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo.config import OctavoConfig
from octavo.engine.child_process import describe_exit
from octavo.engine.engine_process import EngineHost, EngineProcess, EngineThread, engine_child
from octavo.engine.heartbeat import HEARTBEAT_FILE, Beat, Bounds, HeartbeatView, Pulse, judge
from octavo.engine.news import News
from octavo.engine.private_folder import (
    has_note,
    make_private_folder,
    name_private_folder,
    remove_private_folder,
)
from octavo.engine.serial import (
    EngineLaunch,
    EngineMessage,
    FrontEndSlot,
    decode_output,
    encode,
    input_address,
    output_address,
)
from octavo.errors import ConfigError, EngineDeadError, OverloadedError, RequestError
from octavo.logging import one_line
from octavo.types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequests,
    EngineCoreRequestType,
    EngineDead,
    EngineOutput,
    EngineReady,
    UtilityRequest,
    UtilityResult,
)

__all__ = ["AsyncMPClient", "SyncMPClient"]

# The message that the waiter of the engine's process sends in the engine's place. No msgpack message is empty.
_EXITED = b""
_EXIT_NOTICE = "inproc://engine-exit"
# An engine that exits with one of these codes has sent last words first. How long they may still be on the way: they
# have left the engine by then.
_CODES_WITH_LAST_WORDS = (0, 1, 2, 3)
_LAST_WORDS_MS = 2000
_HELLO_MS = 10_000
_READABLE = int(zmq.POLLIN)
_FOR_CALLERS = (EngineCoreOutputs, UtilityResult)


class _Connection:
    """One front end's sockets to an engine, which it owns if it is the first. Knows when the engine is gone.

    Args:
        socket_dir: exists.
        client_index: of this front end.
    """

    def __init__(self, socket_dir: Path, client_index: int = 0) -> None:
        self.exit_code: int | None = None
        self.ended_well = True  # the engine, by itself, when it was told to
        self.ended_well = True  # the engine, by itself, when it was told to
        self.client_index = client_index
        # The loop that watches the output socket: it must cease to before the socket is closed.
        self._loop: asyncio.AbstractEventLoop | None = None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket_dir = socket_dir
        self.host: EngineHost | None = None
        self._is_shared = False  # the engine: by several front ends
        self._closed = False
        try:
            self.input = self._bind(zmq.ROUTER, input_address(socket_dir, client_index))
            self.output = self._bind(zmq.PULL, output_address(socket_dir, client_index))
            self.output.bind(_EXIT_NOTICE)
        except BaseException:
            self.context.destroy(linger=0)
            raise

    @classmethod
    def to_new_engine(cls, config: OctavoConfig, own_process: bool, num_front_ends: int) -> "_Connection":
        """Starts the engine, too; ``num_front_ends`` may connect to it, this one included."""
        child = engine_child() if own_process else None
        socket_dir = child.socket_dir if child is not None else name_private_folder()
        if child is None:
            make_private_folder(socket_dir)
        try:
            made = cls(socket_dir)
        except BaseException:
            if child is not None:
                child.kill()
            remove_private_folder(socket_dir)
            raise
        made._is_shared = num_front_ends > 1
        launch = EngineLaunch(
            config=config,
            input_addresses=[input_address(socket_dir, index) for index in range(num_front_ends)],
            output_addresses=[output_address(socket_dir, index) for index in range(num_front_ends)],
            socket_dir=str(socket_dir),
            launched=time.monotonic(),
        )
        if child is not None:
            made.host = EngineProcess(child, launch, made._on_exit)
        else:
            made.host = EngineThread(launch, made._on_exit)
        return made

    def _bind(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            message = f"no socket can be made in {self.socket_dir}: {error}; set TMPDIR to a folder with a short name"
            raise ConfigError(message) from error
        return socket

    def _on_exit(self, exit_code: int) -> None:
        """In the engine host's thread."""
        self.exit_code = exit_code
        if self._closed:
            return
        socket = self.context.socket(zmq.PUSH)
        socket.connect(_EXIT_NOTICE)
        socket.send(_EXITED)
        socket.close()

    def last_messages(self) -> list[EngineOutput]:
        """What an engine that has exited still had to say; always ends with an EngineDead, ours if need be."""
        assert self.exit_code is not None
        patience = _LAST_WORDS_MS if self.exit_code in _CODES_WITH_LAST_WORDS else 0
        messages: list[EngineOutput] = []
        while self.output.poll(patience):
            messages.append(decode_output(self.output.recv()))
            if isinstance(messages[-1], EngineDead):
                return messages
        return [*messages, EngineDead(describe_exit("engine core", self.exit_code), exit_code=3)]

    def watch_output(self, on_readable: Callable[[], None]) -> None:
        """Calls ``on_readable`` in the running event loop when messages may have come. It has to receive until there
        are none: of what it leaves there it is not told again."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.output.fileno(), on_readable)

    def unwatch_output(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.output.fileno())
        self._loop = None

    def on_connected(self) -> None:
        """Both sockets are connected now, for good. If nobody else is to come, no file needs to name them any more, and
        so none can be left, whoever is killed."""
        if self.host is not None and not self._is_shared and not has_note(self.socket_dir):
            remove_private_folder(self.socket_dir)

    def close(self, timeout: float = 5.0) -> None:
        """Ends the engine, if it is this connection's own, and removes its folder."""
        if self._closed:
            return
        self._closed = True
        if self.host is not None:
            self.ended_well = self.host.stop(timeout)
        self.unwatch_output()
        self.context.destroy(linger=0)
        if self.host is not None:
            remove_private_folder(self.socket_dir)


class _MPClient:
    """What the two clients share: sending, and the meaning of what is received."""

    def __init__(self, connection: _Connection) -> None:
        self.ready: EngineReady | None = None
        self.dead_error: EngineDeadError | None = None
        self.exit_code_hint = 0
        self._connection = connection
        # Also when this object is dropped, or the interpreter ends, without a shutdown.
        self._finalizer = weakref.finalize(self, self._connection.close)
        self._engine_identity: bytes | None = None
        self.heartbeat: HeartbeatView | None = None
        self._began = time.monotonic()
        self._call_ids = itertools.count(1)
        self._progress: Callable[[str, float], None] | None = None

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; None if it is a thread, or another front end's."""
        host = self._connection.host
        return host.pid if isinstance(host, EngineProcess) else None

    @property
    def ended_well(self) -> bool:
        """False after a ``shutdown`` at which the engine did not end by itself."""
        return self._connection.ended_well

    def pulse(self) -> Pulse:
        """How the engine does, also while it loads; its silence before its first beat counts from this client on."""
        if self.heartbeat is None:
            with contextlib.suppress(OSError, ValueError):  # the file is not there, or not whole
                self.heartbeat = HeartbeatView(self._connection.socket_dir / HEARTBEAT_FILE)
        beat = Beat(0.0) if self.heartbeat is None else self.heartbeat.read()
        return judge(beat._replace(beat=max(beat.beat, self._began)), time.monotonic(), Bounds())

    def add_requests(self, requests: Iterable[EngineCoreRequest]) -> None:
        self._send(EngineCoreRequestType.ADD, EngineCoreRequests(list(requests)))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self._send(EngineCoreRequestType.ABORT, list(request_ids))

    def _send_call(self, call_id: int, method: str, args: Sequence[Any]) -> None:
        call = UtilityRequest(self._connection.client_index, call_id, method, list(args))
        self._send(EngineCoreRequestType.UTILITY, call)

    def _send(self, kind: EngineCoreRequestType, message: EngineMessage) -> None:
        """Never blocks: what the engine has not taken in yet waits in the socket."""
        self._check_alive()
        if self._engine_identity is None:
            raise OverloadedError("the model is still being loaded; try again later")
        frames = [self._engine_identity, kind.value, encode(message)]
        self._connection.input.send_multipart(frames, flags=zmq.DONTWAIT)

    def _understand(self, payload: bytes) -> Iterator[EngineCoreOutputs | UtilityResult]:
        """What is for the caller in what came (the notice of an exit stands for all that is still there), in order;
        progress, readiness and the end are taken note of."""
        for message in self._messages(payload):
            if isinstance(message, _FOR_CALLERS):
                yield message
            elif isinstance(message, EngineReady):
                self._become_ready(message)
            elif isinstance(message, EngineDead):
                self._die(EngineDeadError(message.cause), message.exit_code)
            elif self._progress is not None:
                self._progress(message.stage, message.share)

    def _messages(self, payload: bytes) -> list[EngineOutput]:
        """One that cannot be read is the engine's end: what it was about is lost, and somebody would wait for ever."""
        if payload == _EXITED and self._connection.exit_code is not None:
            return self._connection.last_messages()
        try:
            return [decode_output(payload)]
        except (msgspec.DecodeError, RecursionError) as error:
            return [EngineDead(one_line(f"a message of the engine cannot be read: {error}"), exit_code=3)]

    def _die(self, error: EngineDeadError, exit_code: int) -> None:
        if self.dead_error is None:
            self.dead_error = error
            self.exit_code_hint = exit_code

    def _become_ready(self, ready: EngineReady) -> None:
        # Sent before loading began, so it is here: this waits for nothing unless something is badly wrong.
        if not self._connection.input.poll(_HELLO_MS):
            self._die(EngineDeadError("engine core is ready, but its input socket is not connected"), 3)
            return
        self._engine_identity = self._connection.input.recv_multipart()[0]
        self.heartbeat = HeartbeatView(self._connection.socket_dir / HEARTBEAT_FILE)
        self._connection.on_connected()
        self.ready = ready

    def _check_alive(self) -> None:
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))  # a fresh one each time: tracebacks would pile up on it

    def shutdown(self, timeout: float = 5.0) -> None:
        self._die(EngineDeadError("the engine has been shut down"), 0)
        self._connection.close(timeout)
        self._finalizer.detach()


class SyncMPClient(_MPClient):
    """For callers without an event loop; used from one thread."""

    def __init__(self, config: OctavoConfig) -> None:
        super().__init__(_Connection.to_new_engine(config, own_process=True, num_front_ends=1))
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._results: dict[int, UtilityResult] = {}

    def wait_ready(self, progress: Callable[[str, float], None] | None = None) -> EngineReady:
        self._progress = progress
        while self.ready is None:
            self._receive()
        return self.ready

    def get_outputs(self) -> EngineCoreOutputs:
        while not self._outputs:
            self._receive()
        return self._outputs.popleft()

    def call_utility(self, method: str, *args: Any) -> Any:
        call_id = next(self._call_ids)
        self._send(
            EngineCoreRequestType.UTILITY, UtilityRequest(self._connection.client_index, call_id, method, list(args))
        )
        while call_id not in self._results:
            self._receive()
        return _result(self._results.pop(call_id))

    def _receive(self) -> None:
        self._check_alive()
        for message in self._understand(self._connection.output.recv()):
            if isinstance(message, EngineCoreOutputs):
                self._outputs.append(message)
            else:
                self._results[message.call_id] = message


class AsyncMPClient(_MPClient):
    """For an event loop; used from its thread only. The loop receives, from ``wait_ready`` on.

    Args:
        slot: joins the engine that is there, or says how many will join this one.
    """

    def __init__(self, config: OctavoConfig, own_process: bool = True, slot: FrontEndSlot | None = None) -> None:
        slot = slot if slot is not None else FrontEndSlot()
        if slot.socket_dir is None:
            super().__init__(_Connection.to_new_engine(config, own_process, slot.count))
        else:
            super().__init__(_Connection(Path(slot.socket_dir), slot.index))
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._news: News | None = None  # of outputs, or of the engine's death; for who waits for it
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._ready_or_dead = asyncio.Event()
        self._watching = False

    async def wait_ready(self, progress: Callable[[str, float], None] | None = None) -> EngineReady:
        self._progress = progress
        if not self._watching and self.dead_error is None:
            self._watching = True
            self._connection.watch_output(self._receive)
            self._receive()  # what has come before
        await self._ready_or_dead.wait()
        self._check_alive()
        assert self.ready is not None
        return self.ready

    async def get_outputs(self) -> EngineCoreOutputs:
        if self._outputs:
            await asyncio.sleep(0)
        while not self._outputs:
            self._check_alive()
            self._news = News()
            await self._news.wait()
        return self._outputs.popleft()

    async def call_utility(self, method: str, *args: Any) -> Any:
        call_id = next(self._call_ids)
        self._calls[call_id] = answer = asyncio.get_running_loop().create_future()
        try:
            self._send(
                EngineCoreRequestType.UTILITY,
                UtilityRequest(self._connection.client_index, call_id, method, list(args)),
            )
            return _result(await answer)
        finally:
            del self._calls[call_id]

    def _receive(self) -> None:
        """Takes in all that has come."""
        try:
            output = self._connection.output
            # Asked first: an exception at the end of each step's would cost more than all the rest.
            while self.dead_error is None and output.get(zmq.EVENTS) & _READABLE:  # type: ignore[operator]
                for message in self._understand(output.recv(zmq.NOBLOCK)):
                    if isinstance(message, EngineCoreOutputs):
                        self._outputs.append(message)
                    else:
                        self._answer_call(message)
            if self._outputs and self._news is not None:
                self._news.tell()
        except Exception as error:
            self._die(EngineDeadError(one_line(f"{type(error).__name__}: {error}")), 3)

    def engine_is_gone(self, cause: str) -> None:
        """What the front end that owns the engine says of its end, to the others."""
        self._die(EngineDeadError(cause), 3)

    def _answer_call(self, result: UtilityResult) -> None:
        answer = self._calls.get(result.call_id)
        if answer is not None and not answer.done():
            answer.set_result(result)

    def _become_ready(self, ready: EngineReady) -> None:
        super()._become_ready(ready)
        self._ready_or_dead.set()

    def _die(self, error: EngineDeadError, exit_code: int) -> None:
        """Wakes everything that waits; get_outputs still gives what came before."""
        super()._die(error, exit_code)
        self._connection.unwatch_output()
        self._ready_or_dead.set()
        if self._news is not None:
            self._news.tell()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(str(self.dead_error)))


def _result(message: UtilityResult) -> Any:
    if message.error is not None:
        raise RequestError(message.error)
    return message.result
