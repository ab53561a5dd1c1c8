"""``process_*`` and ``python_info``: what the front ends' processes take, added up. The server started when the first
of them did."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

__all__ = ["register_process_metrics"]

_START = "process_start_time_seconds"


def register_process_metrics(registry: CollectorRegistry, pids: Callable[[], list[int]]) -> None:
    """Args:

    pids: the processes to tell of.
    """
    registry.register(_ProcessSum(pids))
    registry.register(PlatformCollector(registry=None))


class _ProcessSum(Collector):
    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for pid in self._pids():
            for family in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                if family.name not in found:
                    found[family.name] = family
                    continue
                so_far, more = found[family.name].samples[0], family.samples[0].value
                value = min(so_far.value, more) if so_far.name == _START else so_far.value + more
                found[family.name].samples[0] = so_far._replace(value=value)
        yield from found.values()
