"""A log line about throughput every ten seconds, as long as there is something to tell."""

import asyncio

from octavo.logging import init_logger
from octavo.types import SchedulerStats

__all__ = ["ThroughputLog"]

logger = init_logger(__name__)


class ThroughputLog:
    """Of all front ends' requests together. A timer of the event loop writes the lines; it runs only while steps come.

    Args:
        interval: seconds between lines.
    """

    def __init__(self, interval: float = 10.0) -> None:
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None
        self._stats = SchedulerStats()
        self._reported = SchedulerStats()

    def on_step(self, stats: SchedulerStats) -> None:
        """A step has been taken in."""
        self._stats = stats
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._report)

    def close(self) -> None:
        """Stops the timer; what was not reported yet is not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report(self) -> None:
        stats, before = self._stats, self._reported
        queries = stats.prefix_cache_queries_total - before.prefix_cache_queries_total
        hits = stats.prefix_cache_hits_total - before.prefix_cache_hits_total
        logger.info(
            "%.1f prompt and %.1f generated tokens/s; %d running, %d waiting; KV cache %.1f %% in use, "
            "%.1f %% of prompt tokens from the prefix cache",
            (stats.prompt_tokens_total - before.prompt_tokens_total) / self._interval,
            (stats.generation_tokens_total - before.generation_tokens_total) / self._interval,
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_cache_usage,
            100 * hits / queries if queries else 0.0,
        )
        self._reported = stats
        self._timer = None  # the next step starts it again
