"""The beats of a server's front ends: a small file that all of them map, in which each writes every second that its
event loop goes on. One that is stopped or hangs takes connections and answers none: the others tell.
"""

import asyncio
import math
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from octavo.engine import Bounds, Pulse
from octavo.errors import ConfigError

__all__ = ["FrontEndBeats"]

_FILE = "front-ends"
_BEAT_SECONDS = 1.0
# Eight bytes each: when it was last seen alive, in seconds of time.monotonic(). 0: not yet.
_ENDED = math.inf


class FrontEndBeats:
    """One front end's side, and its view of the others.

    Args:
        folder: shared by the front ends.
        index: of this one.
        count: of all.

    Raises:
        ConfigError: there is no room in the folder.
    """

    def __init__(self, folder: Path, index: int, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._index, self._count, self._clock = index, count, clock
        self._bounds = Bounds()
        self._began = clock()
        descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, 8 * count)
            self._beats = memoryview(mmap.mmap(descriptor, 8 * count)).cast("d")
        except OSError as error:
            raise ConfigError(
                f"{folder} has no room for the front ends' beats: {error.strerror}; set TMPDIR"
            ) from error
        finally:
            os.close(descriptor)

    def beat(self) -> None:
        """This one goes on."""
        self._beats[self._index] = self._clock()

    async def run(self) -> None:
        """Beats until it is cancelled, which is the end in good order. The others are expected to be there soon."""
        self._began = self._clock()
        try:
            while True:
                self.beat()
                await asyncio.sleep(_BEAT_SECONDS)
        finally:
            self._beats[self._index] = _ENDED

    def pulse(self) -> Pulse:
        """How the worst of the others does."""
        others = [index for index in range(self._count) if index != self._index]
        worst = min(others, key=self._last_seen)
        silent = self._clock() - self._last_seen(worst)
        if silent <= self._bounds.floor:
            return Pulse()
        cause = f"front end {worst} of {self._count} has shown no sign of life for {silent:.0f} s"
        return Pulse(True, silent > self._bounds.hard_floor, cause)

    def _last_seen(self, index: int) -> float:
        return max(self._beats[index], self._began)
