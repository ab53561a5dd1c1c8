"""Counters, gauges and histograms as numbers in shared memory: each front end adds to its own row, and any of them can
tell the sum of all rows.

With one front end the row is private memory. The text format is prometheus_client's; its own way of sharing is decided
by an environment variable before its first import, loses series on the way, and cannot count many observations at once.
"""

import mmap
import os
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.errors import ConfigError

__all__ = ["Counter", "Gauge", "Histogram", "MetricTable", "MetricsFolder", "Summary"]

# Cells of a row, 8 bytes each. Only pages that are written to take memory.
_CELLS = 8192
_ROW_BYTES = 8 * _CELLS
_Cells: TypeAlias = "memoryview[float]"
_FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "summary": SummaryMetricFamily,
}
# The first cells of a row: what the others mean, once all are declared (0: not yet); whose row it is.
_LAYOUT, _PID, _FIRST = 0, 1, 2


@dataclass(frozen=True)
class MetricsFolder:
    """Where several front ends keep their numbers.

    Attributes:
        path: an existing folder that nobody else can write to. May be removed when all have their tables.
        front_end: which one this is, from 0.
        num_front_ends: how many there are.
    """

    path: Path
    front_end: int
    num_front_ends: int


class Counter:
    """A number that only grows."""

    __slots__ = ("_at", "_cells")

    def __init__(self, cells: "_Cells", at: int) -> None:
        self._cells = cells
        self._at = at

    def inc(self, amount: float = 1) -> None:
        self._cells[self._at] += amount


class Gauge:
    """A number that goes up and down. What several front ends set is added up: one alone is to set it."""

    __slots__ = ("_at", "_cells")

    def __init__(self, cells: "_Cells", at: int) -> None:
        self._cells = cells
        self._at = at

    def set(self, value: float) -> None:
        self._cells[self._at] = value


class Histogram:
    """How often a value lay between each two bounds; the cells are one for each bound, one beyond, and the sum."""

    __slots__ = ("_at", "_bounds", "_cells", "_sum_at")

    def __init__(self, cells: "_Cells", at: int, bounds: Sequence[float]) -> None:
        self._cells = cells
        self._at = at
        self._bounds = bounds
        self._sum_at = at + len(bounds) + 1

    def observe(self, value: float, count: int = 1) -> None:
        """``value`` was seen ``count`` times."""
        self._cells[self._at + bisect_left(self._bounds, value)] += count
        self._cells[self._sum_at] += value * count


class Summary:
    """How many values there were, and their sum."""

    __slots__ = ("_at", "_cells")

    def __init__(self, cells: "_Cells", at: int) -> None:
        self._cells = cells
        self._at = at

    def observe(self, value: float) -> None:
        self._cells[self._at] += 1
        self._cells[self._at + 1] += value


class _Series(NamedTuple):
    label_values: tuple[str, ...]
    at: int
    num_cells: int


class _Family(NamedTuple):
    kind: str
    text: str
    label_names: tuple[str, ...]
    bounds: tuple[float, ...]
    only_seen: bool
    series: list[_Series]


class MetricTable(Collector):
    """Declare everything, then ``seal``. All front ends declare the same.

    Args:
        folder: shared with other front ends; None: there are none.
        name: of the table's file in ``folder``.

    Raises:
        ConfigError: the file cannot be made.
    """

    def __init__(self, folder: MetricsFolder | None = None, name: str = "metrics") -> None:
        place = folder if folder is not None else MetricsFolder(Path(), 0, 1)
        size = _ROW_BYTES * place.num_front_ends
        memory = mmap.mmap(-1, size) if folder is None else _map_file(place.path / name, size)
        cells: _Cells = memoryview(memory).cast("d")
        self._rows = [cells[row * _CELLS : (row + 1) * _CELLS] for row in range(place.num_front_ends)]
        self._own = self._rows[place.front_end]
        self._used = _FIRST
        self._families: dict[str, _Family] = {}
        self._old_names: dict[str, str] = {}

    def counter(self, name: str, text: str, labels: Mapping[str, str], only_seen: bool = False) -> Counter:
        """Args:

        name: without ``_total``.
        labels: names and values; another call with the same name may give other values.
        only_seen: not shown as long as it is 0.
        """
        return Counter(self._own, self._declare("counter", name, text, labels, 1, only_seen=only_seen))

    def gauge(self, name: str, text: str, labels: Mapping[str, str]) -> Gauge:
        """A gauge; see ``counter``."""
        return Gauge(self._own, self._declare("gauge", name, text, labels, 1))

    def histogram(
        self, name: str, text: str, labels: Mapping[str, str], bounds: Iterable[float], only_seen: bool = False
    ) -> Histogram:
        """A histogram; see ``counter``. ``bounds`` ascend, without infinity."""
        fixed = tuple(float(bound) for bound in bounds)
        at = self._declare("histogram", name, text, labels, len(fixed) + 2, fixed, only_seen)
        return Histogram(self._own, at, fixed)

    def summary(self, name: str, text: str, labels: Mapping[str, str], only_seen: bool = False) -> Summary:
        """A summary without quantiles; see ``counter``."""
        return Summary(self._own, self._declare("summary", name, text, labels, 2, only_seen=only_seen))

    def _declare(
        self,
        kind: str,
        name: str,
        text: str,
        labels: Mapping[str, str],
        num_cells: int,
        bounds: tuple[float, ...] = (),
        only_seen: bool = False,
    ) -> int:
        family = self._families.setdefault(name, _Family(kind, text, tuple(labels), bounds, only_seen, []))
        if (family.kind, family.label_names, family.bounds) != (kind, tuple(labels), bounds):
            raise ValueError(f"{name} is declared in two ways")
        at, self._used = self._used, self._used + num_cells
        if self._used > _CELLS:
            raise ValueError(f"{name}: a table has no more than {_CELLS} numbers")
        family.series.append(_Series(tuple(labels.values()), at, num_cells))
        return at

    def rename(self, old: str, new: str) -> None:
        """``new`` is shown under its ``old`` name too."""
        self._old_names[old] = new

    def seal(self) -> None:
        """Everything is declared: from now on the numbers count in the sums."""
        self._own[_PID] = os.getpid()
        self._own[_LAYOUT] = zlib.crc32(repr(self._families).encode()) + 1

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client's registry."""
        totals = self._totals()
        for name, family in self._families.items():
            yield _shown(name, family.text, family, totals)
        for old, new in self._old_names.items():
            yield _shown(old, f"Old name of {new}.", self._families[new], totals)

    def pids(self) -> list[int]:
        """The processes whose numbers are in the sums."""
        return [int(row[_PID]) for row in self._sealed_rows()]

    def _sealed_rows(self) -> "list[_Cells]":
        return [row for row in self._rows if row[_LAYOUT]]

    def _totals(self) -> list[float]:
        rows = self._sealed_rows()
        if any(row[_LAYOUT] != self._own[_LAYOUT] for row in rows):
            raise RuntimeError("front ends declare different metrics: they have different configurations")
        return [sum(column) for column in zip(*(row[: self._used].tolist() for row in rows), strict=True)]


def _map_file(path: Path, size: int) -> mmap.mmap:
    """The file, made by whoever comes first: it begins as zeros."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Not ftruncate: a page that then finds no room on the disk ends the process that writes to it.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        message = f"{path.parent} has no room for {size} bytes that the front ends share: {error.strerror}; set TMPDIR"
        raise ConfigError(message) from error
    finally:
        os.close(descriptor)


def _shown(name: str, text: str, family: _Family, totals: list[float]) -> Metric:
    shown: Any = _FAMILIES[family.kind](name, text, labels=family.label_names)
    for series in family.series:
        cells = totals[series.at : series.at + series.num_cells]
        if family.only_seen and not any(cells):
            continue
        if family.kind == "histogram":
            shown.add_metric(series.label_values, _cumulated(family.bounds, cells), cells[-1])
        else:
            shown.add_metric(series.label_values, *cells)
    return shown  # type: ignore[no-any-return]


def _cumulated(bounds: tuple[float, ...], cells: list[float]) -> list[tuple[str, float]]:
    total, buckets = 0.0, []
    for bound, count in zip((*bounds, float("inf")), cells[:-1], strict=True):
        total += count
        buckets.append((floatToGoString(bound), total))  # type: ignore[no-untyped-call]
    return buckets
