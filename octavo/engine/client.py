"""How a front end reaches an EngineCore: one protocol, whether it is an object, a thread or another process.

Everything after ``wait_ready`` may raise EngineDeadError, whose message is the cause. Torch and sockets are imported
only by the client that needs them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from octavo import envs
from octavo.config import OctavoConfig
from octavo.errors import EngineDeadError
from octavo.logging import one_line
from octavo.types import EngineCoreOutputs, EngineCoreRequest, EngineReady

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore
    from octavo.engine.heartbeat import HeartbeatView, Pulse
    from octavo.engine.serial import FrontEndSlot

__all__ = ["AsyncEngineCoreClient", "EngineCoreClient", "InprocClient", "make_async_client", "make_sync_client"]


class _Client(Protocol):
    """What all clients have in common.

    Attributes:
        ready: the engine's final values, once it is loaded.
        dead_error: why the engine is gone, once it is.
        exit_code_hint: what a server should then exit with: 1 for configuration or model, 2 for a flag, 3 for a death.
    """

    ready: EngineReady | None
    dead_error: EngineDeadError | None
    exit_code_hint: int

    def add_requests(self, requests: Iterable[EngineCoreRequest]) -> None:
        """Hands over what one request of a caller's is made of; the engine takes all of it or nothing. Its refusal is a
        RequestError here (in-process), or for each an output with ``finish_reason`` ERROR and ``refusal`` set."""
        ...

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests; each that the engine still had gets a last output. Unknown ids are ignored."""
        ...

    def shutdown(self, timeout: float = 5.0) -> None:
        """Ends the engine at any moment of its life, within about ``timeout`` seconds; may be called again."""
        ...


class EngineCoreClient(_Client, Protocol):
    """For callers without an event loop. Used from one thread."""

    def wait_ready(self, progress: Callable[[str, float], None] | None = None) -> EngineReady:
        """Returns when the model is loaded. EngineDeadError if it cannot be."""
        ...

    def get_outputs(self) -> EngineCoreOutputs:
        """The next step's outputs (there may be none in it). To be called while requests are unfinished."""
        ...

    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a method of EngineCore that is on its list. RequestError if the call fails."""
        ...


class AsyncEngineCoreClient(_Client, Protocol):
    """For an event loop; used from its thread only.

    Attributes:
        heartbeat: of an engine that has begun to load.
    """

    heartbeat: "HeartbeatView | None"

    @property
    def ended_well(self) -> bool:
        """False after a ``shutdown`` at which the engine did not end by itself."""
        ...

    async def wait_ready(self, progress: Callable[[str, float], None] | None = None) -> EngineReady: ...

    async def get_outputs(self) -> EngineCoreOutputs:
        """The next step's outputs. The loop's other tasks have had their turn meanwhile, even where it was there."""
        ...

    async def call_utility(self, method: str, *args: Any) -> Any: ...

    def pulse(self) -> "Pulse":
        """How the engine does, as far as can be seen without asking it."""
        ...

    def engine_is_gone(self, cause: str) -> None:
        """Tells a client that has joined another's engine."""
        ...


def make_sync_client(config: OctavoConfig, progress: Callable[[str, float], None] | None = None) -> EngineCoreClient:
    """InprocClient (loaded on return), or SyncMPClient with OCTAVO_ENABLE_MULTIPROCESSING=1."""
    if envs.enable_multiprocessing(default=False):
        from octavo.engine.mp_client import SyncMPClient

        return SyncMPClient(config)
    return InprocClient(config, progress)


def make_async_client(config: OctavoConfig, slot: "FrontEndSlot | None" = None) -> AsyncEngineCoreClient:
    """AsyncMPClient; its engine is a thread of this process with OCTAVO_ENABLE_MULTIPROCESSING=0. Returns at once.

    Args:
        slot: for one of several front ends.
    """
    from octavo.engine.mp_client import AsyncMPClient

    return AsyncMPClient(config, own_process=envs.enable_multiprocessing(default=True), slot=slot)


class InprocClient:
    """EngineCore as an object of the caller's thread: each ``get_outputs`` is a step."""

    def __init__(self, config: OctavoConfig, progress: Callable[[str, float], None] | None = None) -> None:
        from octavo.engine.core import EngineCore

        self.dead_error: EngineDeadError | None = None
        self.exit_code_hint = 0
        self._pending: deque[EngineCoreOutputs] = deque()
        self._core: EngineCore | None = EngineCore(config, progress)
        self.ready: EngineReady | None = self._core.ready

    def wait_ready(self, progress: Callable[[str, float], None] | None = None) -> EngineReady:
        return self._live_core().ready

    def add_requests(self, requests: Iterable[EngineCoreRequest]) -> None:
        self._live_core().add_request(*requests)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self._pending.extend(self._live_core().abort_requests(request_ids).values())

    def get_outputs(self) -> EngineCoreOutputs:
        core = self._live_core()
        while not self._pending and core.has_work():
            try:
                self._pending.extend(core.next_outputs().values())
            except BaseException as error:
                # A step that has ended in its middle leaves scheduler and worker at odds: no other may follow.
                self.exit_code_hint = 3
                self.dead_error = EngineDeadError(one_line(f"{type(error).__name__}: {error}"))
                raise
        return self._pending.popleft() if self._pending else EngineCoreOutputs([])

    def call_utility(self, method: str, *args: Any) -> Any:
        return self._live_core().call_utility(method, args)

    def shutdown(self, timeout: float = 5.0) -> None:
        core, self._core = self._core, None
        if core is not None:
            core.shutdown()
            if self.dead_error is None:
                self.dead_error = EngineDeadError("the engine has been shut down")

    def _live_core(self) -> "EngineCore":
        if self.dead_error is not None or self._core is None:
            raise self.dead_error or EngineDeadError("the engine has been shut down")
        return self._core
