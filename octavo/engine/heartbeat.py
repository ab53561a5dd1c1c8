"""The engine's heartbeat: what it is doing, in a small file that its front ends map, and what is to be made of that.

Nobody is asked and nothing is sent: an engine that is stuck in a step, or stopped, can still be judged. Each field is
eight bytes in one place, written and read at once; whatever a reader finds between two writes is judged safely, for a
step begins last with its start, and ends last with the end of it. Times are seconds of time.monotonic(), which all
processes of a machine share.
"""

import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from octavo.errors import ConfigError

__all__ = ["HEARTBEAT_FILE", "Beat", "Bounds", "Heartbeat", "HeartbeatView", "Pulse", "judge"]

HEARTBEAT_FILE = "heartbeat"

_BEAT_SECONDS = 1.0
# Fields, in the order of Beat.
_BEAT, _STARTED, _STEP, _TOKENS, _SLOWEST, _PER_TOKEN = range(6)
_SIZE = 8 * 6
# Until a step was measured a token is taken to cost so much: more than with any model that people serve.
_PER_TOKEN_UNMEASURED = 0.1
_MOST_READS = 4


class Beat(NamedTuple):
    """What the engine has written.

    Attributes:
        beat: when its process was last seen alive.
        started: when the step in progress began; 0: there is none.
        step: its number.
        num_tokens: that it computes.
        slowest_step: seconds.
        per_token: seconds a token, in the step where they were fewest.
    """

    beat: float
    started: float = 0.0
    step: float = 0.0
    num_tokens: float = 0.0
    slowest_step: float = 0.0
    per_token: float = _PER_TOKEN_UNMEASURED


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a step may take: so many seconds, or times what the steps so far let one expect, whichever is more. So
    long may the process be silent, too: ``floor`` and ``hard_floor`` seconds."""

    floor: float = 10.0
    factor: float = 5.0
    hard_floor: float = 120.0
    hard_factor: float = 20.0

    def soft(self, beat: Beat) -> float:
        return max(self.floor, self.factor * _expected(beat))

    def hard(self, beat: Beat) -> float:
        return max(self.hard_floor, self.hard_factor * _expected(beat))


def _expected(beat: Beat) -> float:
    """A long prefill is no alarm, also where none has been seen yet: its tokens cost no more than the cheapest did."""
    return max(beat.slowest_step, beat.num_tokens * beat.per_token)


class Pulse(NamedTuple):
    """What is to be made of a beat.

    Attributes:
        is_overdue: the step in progress takes longer than it should, or the process is silent.
        is_stuck: so much longer that it will hardly go on.
        cause: what is known; "" where all is well.
    """

    is_overdue: bool = False
    is_stuck: bool = False
    cause: str = ""


def judge(beat: Beat, now: float, bounds: Bounds) -> Pulse:
    """Whether the engine goes on, as far as can be told at ``now``."""
    silent = now - beat.beat
    if beat.started:
        elapsed = now - beat.started
        if elapsed > bounds.soft(beat):
            cause = (
                f"step {beat.step:.0f} ({beat.num_tokens:.0f} tokens) has taken {elapsed:.0f} s so far, "
                f"{bounds.soft(beat):.0f} s were expected at most"
            )
            return Pulse(True, elapsed > bounds.hard(beat) or silent > bounds.hard_floor, cause)
    if silent > bounds.floor:
        cause = f"the engine's process has shown no sign of life for {silent:.0f} s"
        return Pulse(True, silent > bounds.hard_floor, cause)
    return Pulse()


class Heartbeat:
    """The engine's side.

    Args:
        path: of a file that is made; whoever made its folder removes it.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Not ftruncate: a page that then finds no room on the disk ends the process that writes to it.
            os.posix_fallocate(descriptor, 0, _SIZE)
            self._fields = memoryview(mmap.mmap(descriptor, _SIZE)).cast("d")
        except OSError as error:
            raise ConfigError(f"{path.parent} has no room for the heartbeat: {error.strerror}; set TMPDIR") from error
        finally:
            os.close(descriptor)
        self._bounds = Bounds()
        self._per_token, self._slowest = _PER_TOKEN_UNMEASURED, 0.0
        self._fields[_PER_TOKEN] = self._per_token
        self._fields[_BEAT] = time.monotonic()
        self._stopped = threading.Event()
        threading.Thread(target=self._beat, name="engine-heartbeat", daemon=True).start()

    def begin_step(self, step: int, num_tokens: int) -> None:
        fields = self._fields
        fields[_STEP] = step
        fields[_TOKENS] = num_tokens
        fields[_STARTED] = time.monotonic()

    def end_step(self) -> None:
        """The step that was begun last is done, and its time is known."""
        fields = self._fields
        num_tokens, started = fields[_TOKENS], fields[_STARTED]
        elapsed = time.monotonic() - started
        if elapsed > self._slowest:
            # One that was overdue counts as if it had ended in time: an engine that was stopped for an hour must not
            # be given five hours for its next step. A model that is really so slow is believed soon enough.
            beat = Beat(0.0, started, 0.0, num_tokens, self._slowest, self._per_token)
            fields[_SLOWEST] = self._slowest = min(elapsed, self._bounds.soft(beat))
        if elapsed < self._per_token * num_tokens:
            fields[_PER_TOKEN] = self._per_token = elapsed / num_tokens
        fields[_STARTED] = 0.0

    def stop(self) -> None:
        """Ends the beat: from now on the engine looks as if it were stopped."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(_BEAT_SECONDS):
            self._fields[_BEAT] = time.monotonic()


class HeartbeatView:
    """A front end's side.

    Args:
        path: of the file that the engine has made. It may be removed afterwards.
    """

    def __init__(self, path: Path, bounds: Bounds | None = None) -> None:
        self.bounds = bounds if bounds is not None else Bounds()
        with path.open("rb") as file:
            self._fields = memoryview(mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)).cast("d")

    def pulse(self) -> Pulse:
        """How the engine does."""
        return judge(self.read(), time.monotonic(), self.bounds)

    def step_seconds(self) -> float:
        """For how long the step in progress has gone on; 0: there is none."""
        started = self.read().started
        return time.monotonic() - started if started else 0.0

    def read(self) -> Beat:
        """What is there now, all of one step: no two begin at the same moment."""
        for _ in range(_MOST_READS):
            found = Beat(*self._fields)
            if self._fields[_STARTED] == found.started:
                return found
        return found._replace(started=0.0)  # it steps faster than it can be read
