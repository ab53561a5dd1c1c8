"""EngineCoreProc: EngineCore behind sockets, and the process around it (``python -m octavo.engine.core_proc``).

Three threads: input (receive, decode), main (schedule, execute, update), output (encode, send). The process lives as
long as its standard input is open: end of file there means that the front end is gone, however it went.
"""

import contextlib
import gc
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from octavo.engine.child_process import LifeLine
from octavo.engine.core import EngineCore
from octavo.engine.heartbeat import HEARTBEAT_FILE, Heartbeat
from octavo.engine.serial import EngineLaunch, EngineMessage, decode_launch, decode_message, encode
from octavo.errors import ConfigError, ModelError, OctavoError, OverloadedError, RequestError, UsageError
from octavo.executor import WORKERS
from octavo.logging import init_logger, one_line
from octavo.platforms import current_platform
from octavo.types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequests,
    EngineDead,
    EngineOutput,
    EngineProgress,
    FinishReason,
    Refusal,
    UtilityRequest,
    UtilityResult,
)

__all__ = ["EngineCoreProc"]

logger = init_logger("octavo.engine.core_proc")  # the process runs this module as __main__

_ENGINE_IDENTITY = b"engine-0"
_EXIT_CONFIG, _EXIT_USAGE, _EXIT_DIED = 1, 2, 3
# How long the last messages may take to reach a front end that reads slowly, milliseconds.
_LINGER_MS = 2000


class EngineCoreProc:
    """Serves one EngineCore to the front ends named in ``launch``; ``run`` is its whole life.

    Args:
        on_loaded: called once the model is there.
    """

    def __init__(self, launch: EngineLaunch, on_loaded: Callable[[], None] = lambda: None) -> None:
        self._launch = launch
        self._on_loaded = on_loaded
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._core: EngineCore | None = None
        # None: stop. An exception: an IO thread has failed.
        self._input_queue: queue.SimpleQueue[EngineMessage | Exception | None] = queue.SimpleQueue()
        # (client index or None for all, message); None: stop.
        self._output_queue: queue.SimpleQueue[tuple[int | None, EngineOutput] | None] = queue.SimpleQueue()
        self._sender_error: Exception | None = None  # the output thread has ended with it, and has said so
        self.num_bad_frames = 0

    def run(self) -> int:
        """Loads, serves until stopped or until it fails, says last words. Returns the exit code."""
        input_thread = threading.Thread(target=self._guarded, args=(self._receive,), name="engine-input", daemon=True)
        output_thread = threading.Thread(target=self._guarded, args=(self._send,), name="engine-output", daemon=True)
        input_thread.start()
        output_thread.start()
        exit_code = 0
        heartbeat = None
        try:
            # First of all: one that is stopped while it loads is to be noticed, too.
            heartbeat = Heartbeat(Path(self._launch.socket_dir) / HEARTBEAT_FILE)
            self._send_progress("starting", 0.0)
            core = EngineCore(self._launch.config, self._send_progress, started=self._launch.launched)
            self._core = core
            core.heartbeat = heartbeat
            self._on_loaded()
            self._output_queue.put((None, core.ready))
            self.run_busy_loop(core)
            self._output_queue.put((None, EngineDead("the engine core was told to stop", _EXIT_DIED)))
        except Exception as error:
            exit_code = self._say_last_words(error)
        finally:
            if heartbeat is not None:
                heartbeat.stop()
            if self._core is not None:
                self._core.shutdown()
            self._output_queue.put(None)
            output_thread.join()
            self._context.term()  # ends the input thread's poll
            input_thread.join()
        return exit_code

    @property
    def loading(self) -> bool:
        return self._core is None

    def stop(self) -> None:
        """Ends ``run`` after the step in progress. May be called from any thread."""
        self._input_queue.put(None)

    # ---- main thread ------------------------------------------------------------------------------------------------

    def run_busy_loop(self, core: EngineCore) -> None:
        """Sleeps while there is nothing to do; else takes in what has arrived, then does a step."""
        while True:
            idle = not core.has_work()
            while idle or not self._input_queue.empty():
                message = self._input_queue.get()
                if message is None:
                    return self._put_outputs(core.abort_all())
                if isinstance(message, Exception):
                    raise message
                self._handle(core, message)
                idle = False
            if core.has_work():
                self._put_outputs(core.next_outputs())

    def _put_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for item in outputs.items():
            self._output_queue.put(item)

    def _handle(self, core: EngineCore, message: EngineMessage) -> None:
        if isinstance(message, EngineCoreRequests):
            try:
                core.add_request(*message.requests)
            except RequestError as error:
                self._output_queue.put((_client_of(message), _refusal(message, error)))
        elif isinstance(message, UtilityRequest):
            self._output_queue.put((message.client_index, _call_utility(core, message)))
        else:
            self._put_outputs(core.abort_requests(message))

    def _send_progress(self, stage: str, share: float) -> None:
        self._output_queue.put((None, EngineProgress(stage, share)))

    def _say_last_words(self, error: Exception) -> int:
        if error is self._sender_error:
            return _EXIT_DIED
        cause = _one_line_of(error)
        level = logging.DEBUG if isinstance(error, OctavoError) else logging.ERROR
        logger.log(level, "engine core failed: %s", cause, exc_info=error)
        exit_code = _EXIT_DIED
        if self.loading and isinstance(error, ConfigError | ModelError):
            exit_code = _EXIT_USAGE if isinstance(error, UsageError) else _EXIT_CONFIG
        self._output_queue.put((None, EngineDead(cause, exit_code)))
        return exit_code

    def _guarded(self, work: Callable[[], None]) -> None:
        """Runs an IO thread; its failure becomes the main thread's."""
        try:
            work()
        except Exception as error:
            self._input_queue.put(error)

    # ---- input thread -----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Receives and decodes until the context is terminated."""
        sockets: list[zmq.Socket[bytes]] = []
        poller = zmq.Poller()
        try:
            for address in self._launch.input_addresses:
                sockets.append(socket := self._context.socket(zmq.DEALER))
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVHWM, 0)
                socket.setsockopt(zmq.IDENTITY, _ENGINE_IDENTITY)
                socket.connect(address)
                socket.send(b"")  # makes the engine known to the front end's ROUTER
                poller.register(socket, zmq.POLLIN)
            while True:
                for ready, _ in poller.poll():
                    self._decode(ready.recv_multipart())
        except zmq.ContextTerminated:
            return
        finally:
            for socket in sockets:
                socket.close()

    def _decode(self, frames: list[bytes]) -> None:
        """A message that is not one of ours is dropped, counted and logged: it must not end the engine."""
        try:
            message = decode_message(frames)
            client_index = _client_of(message)
            if not 0 <= client_index < len(self._launch.output_addresses):
                raise msgspec.ValidationError(f"client_index {client_index} is unknown")
        except (msgspec.DecodeError, RecursionError) as error:
            self.num_bad_frames += 1
            logger.warning("dropped a message that cannot be read (%d so far): %s", self.num_bad_frames, error)
            return
        self._input_queue.put(message)

    # ---- output thread ----------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Encodes and sends until told to stop; then waits, not without limit, until all is on its way."""
        sockets: list[zmq.Socket[bytes]] = []
        try:
            for address in self._launch.output_addresses:
                sockets.append(socket := self._context.socket(zmq.PUSH))
                socket.setsockopt(zmq.LINGER, _LINGER_MS)
                socket.setsockopt(zmq.SNDHWM, 0)
                socket.connect(address)
            while (item := self._output_queue.get()) is not None:
                client_index, message = item
                payload = encode(message)
                for socket in sockets if client_index is None else (sockets[client_index],):
                    socket.send(payload)
        except Exception as error:
            # The main thread will stop, but what it puts into the queue nobody sends any more.
            self._sender_error = error
            cause = _one_line_of(error)
            logger.error("engine core failed: its output cannot be sent: %s", cause, exc_info=error)
            for socket in sockets:
                socket.send(encode(EngineDead(cause, _EXIT_DIED)))
            raise
        finally:
            for socket in sockets:
                socket.close()


def _one_line_of(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def _client_of(message: EngineMessage) -> int:
    """Index of the front end that a message came from; 0 where it does not say so."""
    if isinstance(message, list):
        return 0
    if isinstance(message, UtilityRequest):
        return message.client_index
    clients = {request.client_index for request in message.requests}
    if len(clients) != 1:
        raise msgspec.ValidationError(f"requests of one front end were expected, got some of {len(clients)}")
    return clients.pop()


def _refusal(message: EngineCoreRequests, error: RequestError) -> EngineCoreOutputs:
    refusal = Refusal(error.param)
    if isinstance(error, OverloadedError):
        refusal.retry_after, refusal.limit = error.retry_after, error.limit
    return EngineCoreOutputs(
        [
            EngineCoreOutput(each.request_id, [], finish_reason=FinishReason.ERROR, error=str(error), refusal=refusal)
            for each in message.requests
        ]
    )


def _call_utility(core: EngineCore, request: UtilityRequest) -> UtilityResult:
    try:
        return UtilityResult(request.call_id, result=core.call_utility(request.method, request.args))
    except RequestError as error:
        return UtilityResult(request.call_id, error=str(error))


# ---- the process ----------------------------------------------------------------------------------------------------


def _collect_what_is_new() -> None:
    gc.freeze()  # what is there stays
    gc.enable()


def main() -> NoReturn:
    gc.disable()  # until the model is loaded: a walk through all of torch takes 80 to 200 ms, and finds nothing
    launches: queue.SimpleQueue[EngineLaunch] = queue.SimpleQueue()
    # First of all, so that it works while torch is being imported.
    LifeLine(lambda message: launches.put(decode_launch(message)), logger)
    with contextlib.suppress(Exception):  # loading the model does the same, and tells what is wrong
        WORKERS.get(current_platform().name)  # torch and all: a second, in which the front end finds the model
    proc = EngineCoreProc(launches.get(), on_loaded=_collect_what_is_new)
    exit_code = proc.run()
    os._exit(exit_code)  # not sys.exit: nothing of an engine that has said its last words may hold the process up


if __name__ == "__main__":
    main()
