"""Takes a changed file of API keys while the server runs. Each front end looks for itself."""

import asyncio
import os
from pathlib import Path

from octavo.config import AccessConfig
from octavo.entrypoints.access.api_keys import ApiKey, check_priorities, list_names, read_api_keys
from octavo.entrypoints.access.key_gate import KeyGate
from octavo.errors import ConfigError
from octavo.logging import init_logger

__all__ = ["KeyReload"]

logger = init_logger(__name__)

_SECONDS = 2.0

# device, inode, size, time of change; None: the file is not there
_Stamp = tuple[int, int, int, int] | None


class KeyReload:
    """Made before the file is read for the first time.

    Args:
        config: names the file.

    Raises:
        ConfigError: see read_api_keys.

    Attributes:
        keys: those of the first reading.
    """

    def __init__(self, config: AccessConfig) -> None:
        self._config = config
        self._seen = self._read = self._stamp()
        self.keys: list[ApiKey] = read_api_keys(config)

    async def run(self, gate: KeyGate, scheduling_policy: str) -> None:
        """Until it is cancelled. A file that has changed is read once it has settled; one that is wrong is told of,
        once, and changes nothing."""
        while True:
            await asyncio.sleep(_SECONDS)
            await self.look(gate, scheduling_policy)

    async def look(self, gate: KeyGate, scheduling_policy: str) -> None:
        stamp = self._stamp()
        settled = stamp == self._seen
        self._seen = stamp
        if not settled or stamp == self._read:
            return
        self._read = stamp
        try:
            keys = await asyncio.to_thread(read_api_keys, self._config)  # there may be thousands
            check_priorities(keys, scheduling_policy)
        except ConfigError as error:
            logger.error("the API keys stay as they are: %s", error)
            return
        gate.replace_keys(keys)
        logger.info("API keys were read again from %s: %s", self._config.api_key_file, list_names(keys))

    def _stamp(self) -> _Stamp:
        if self._config.api_key_file is None:
            return None
        try:
            found = os.stat(Path(self._config.api_key_file))
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
