"""Watches the engine and the front ends for those who do not ask: a line in the log when one is overdue and when it
goes on again, and a word to the service manager while all is well."""

import asyncio

from octavo.engine import Pulse
from octavo.entrypoints.server_state import ServerState
from octavo.entrypoints.service_manager import ServiceManager
from octavo.logging import init_logger

__all__ = ["EngineWatch"]

logger = init_logger(__name__)

_SECONDS = 1.0


class EngineWatch:
    """Args:

    state: of the first front end.
    manager: is told every time that the server is live.
    """

    def __init__(self, state: ServerState, manager: ServiceManager) -> None:
        self._state = state
        self._manager = manager
        self._overdue: set[str] = set()

    async def run(self) -> None:
        """Until it is cancelled. The engine has been started; the service manager hears nothing until it is loaded."""
        interval = self._manager.watchdog_seconds
        loop = asyncio.get_running_loop()
        next_word = loop.time()
        while True:
            state = self._state
            self._log("the engine is", "the engine goes", state.engine_pulse())
            self._log("a front end is", "the front ends go", state.front_ends_pulse())
            if interval is not None and loop.time() >= next_word and state.services is not None:
                next_word = loop.time() + interval
                if self._state.probes.live()[0] == 200:
                    self._manager.alive()
            await asyncio.sleep(_SECONDS if interval is None else min(_SECONDS, interval))

    def _log(self, who_is: str, who_goes: str, pulse: Pulse) -> None:
        if pulse.is_overdue and who_is not in self._overdue:
            logger.warning("%s overdue, which /ready tells: %s", who_is, pulse.cause)
            self._overdue.add(who_is)
        elif who_is in self._overdue and not pulse.is_overdue:
            logger.info("%s on", who_goes)
            self._overdue.discard(who_is)
