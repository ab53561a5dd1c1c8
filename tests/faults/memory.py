"""Watches the memory of processes while they work, and says whether it grows with the work."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Growth", "MemoryWatch", "growth", "private_bytes"]

# Allocators fill up and caches warm in the beginning.
_WARM_UP_SHARE = 0.4
_FEWEST_SAMPLES = 5
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Growth:
    """How much a process has gained between the two halves of the time after its warm-up: medians, bytes."""

    before: float
    after: float

    @property
    def gained(self) -> float:
        return self.after - self.before


def growth(samples: Iterable[tuple[float, float]], warm_up_share: float = _WARM_UP_SHARE) -> Growth:
    """Args:

    samples: (work done, bytes), in order.
    warm_up_share: of the work, which is not looked at.
    """
    found = list(samples)
    begin = found[-1][0] * warm_up_share
    middle = (begin + found[-1][0]) / 2
    first = [size for done, size in found if begin <= done < middle]
    second = [size for done, size in found if done >= middle]
    if min(len(first), len(second)) < _FEWEST_SAMPLES:
        raise ValueError(f"{len(found)} samples are too few to tell; work longer or look more often")
    return Growth(_median(first), _median(second))


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def private_bytes(pid: int) -> int:
    """Memory that the process alone uses, and that it has swapped out."""
    fields = {"Private_Clean", "Private_Dirty", "Swap"}
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    values = (line.split() for line in lines[1:])
    return sum(int(words[1]) * 1024 for words in values if words[0].rstrip(":") in fields)


@dataclass
class MemoryWatch:
    """Looks at processes while they work, in a thread of its own. Use as a context.

    Attributes:
        done: says how much work has been done.
        step: looks again when so much more has been done.
        samples: of each name, (work done, bytes).
    """

    pids: dict[str, int]
    done: Callable[[], float]
    step: float
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def __enter__(self) -> "MemoryWatch":
        self._ended = threading.Event()
        self.samples = {name: [] for name in self.pids}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        next_look = 0.0
        while not self._ended.wait(_POLL_SECONDS):
            done = self.done()
            if done < next_look:
                continue
            next_look = done + self.step
            for name, pid in self.pids.items():
                try:
                    self.samples[name].append((done, private_bytes(pid)))
                except (FileNotFoundError, ProcessLookupError):
                    return  # the server has ended
