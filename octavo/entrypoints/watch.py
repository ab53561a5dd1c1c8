"""Watches the engine for those who do not ask: a line in the log when it is overdue and when it goes on again, and a
word to the service manager while all is well."""

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
        self._was_overdue = False

    async def run(self) -> None:
        """Until it is cancelled. The engine is loaded."""
        interval = self._manager.watchdog_seconds
        loop = asyncio.get_running_loop()
        next_word = loop.time()
        while True:
            assert self._state.services is not None
            self._log(self._state.services.engine.pulse())
            if interval is not None and loop.time() >= next_word:
                next_word = loop.time() + interval
                if self._state.probes.live()[0] == 200:
                    self._manager.alive()
            await asyncio.sleep(_SECONDS if interval is None else min(_SECONDS, interval))

    def _log(self, pulse: Pulse) -> None:
        if pulse.is_overdue and not self._was_overdue:
            logger.warning("the engine is overdue, which /ready tells: %s", pulse.cause)
        elif self._was_overdue and not pulse.is_overdue:
            logger.info("the engine goes on")
        self._was_overdue = pulse.is_overdue
