"""The engine's series, with vLLM's names, labels and meanings; docs/metrics.md tells of each.

Whoever sees the engine's outputs calls the ``on_*`` methods; nothing here knows where the numbers come from.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.metrics import buckets
from octavo.metrics.process_metrics import register_process_metrics
from octavo.metrics.table import Counter, Gauge, Histogram, MetricsFolder, MetricTable
from octavo.types import FinishedRequest, FinishedSequence, FinishReason, SchedulerStats, StepCounts

__all__ = ["CONTENT_TYPE", "EngineMetrics"]

# Longest request that the token histograms tell apart when nobody says what the model's is.
_LONGEST_REQUEST = 1_000_000
# What a request may meet when it comes; see Admission.
_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
# What vLLM 0.10 called them. Dashboards and autoscalers still ask for these.
_OLD_NAMES = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries": "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_hits": "vllm:prefix_cache_hits",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}


class EngineMetrics:
    """Counts what one engine does.

    Args:
        model_name: label of every series: the first served name.
        engine_index: label of every series.
        max_model_len: tokens; bounds the histograms of tokens a request.
        folder: where the front ends of a server keep their numbers, so that each can tell the sum; None: there is one.
    """

    def __init__(
        self,
        model_name: str,
        engine_index: int = 0,
        max_model_len: int = _LONGEST_REQUEST,
        folder: MetricsFolder | None = None,
    ) -> None:
        self._labels = {"model_name": model_name, "engine": str(engine_index)}
        self._stats = SchedulerStats()  # what the totals were at the last step
        self._table = MetricTable(folder, "engine-metrics")
        self._progress = _Progress(self._labels)
        self._cache_info = _Info("vllm:cache_config_info", "The KV cache as it is; always 1.")
        self._declare_state()
        self._declare_tokens()
        self._declare_requests(buckets.token_counts(max_model_len))
        for old, new in _OLD_NAMES.items():
            self._table.rename(old, new)
        self._table.seal()
        self.registry = CollectorRegistry()
        self.registry.register(self._table)
        self.registry.register(self._cache_info)
        self.registry.register(self._progress)
        register_process_metrics(self.registry, self._table.pids)

    def _declare_state(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting to be scheduled.")
        self._waiting_for_room = self._gauge(
            "num_requests_waiting_by_reason",
            "Waiting requests, by what they wait for.",
            reason="capacity",
        )
        # octavo defers nobody; the series is there so that the sum over the reasons is.
        self._gauge("num_requests_waiting_by_reason", "", reason="deferred")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks in use; 1 is all of them.")
        self._cache_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._device_hits = self._counter(
            "prompt_tokens_cached_by_source", "Tokens found in the prefix cache, by where it lay.", source="device"
        )
        self._preemptions = self._counter("num_preemptions", "Requests that lost their KV blocks to others.")
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in a step.", buckets.ITERATION_TOKENS
        )
        self._step_seconds = self._table.histogram(
            "octavo:step_duration_seconds",
            "From a step's launch to its results.",
            self._labels,
            buckets.STEP_SECONDS,
        )

    def _declare_tokens(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens whose computation is complete.")
        self._computed_prompt_tokens, self._cached_prompt_tokens = (
            self._counter("prompt_tokens_by_source", "Prompt tokens, by where their KV came from.", source=source)
            for source in ("local_compute", "local_cache_hit")
        )
        self._prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens that had been computed before."
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", buckets.TIME_TO_FIRST_TOKEN
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between one token and the next.", buckets.TOKEN_SECONDS
        )

    def _declare_requests(self, token_counts: Iterable[float]) -> None:
        self._success = {
            reason: self._counter(
                "request_success", "Requests that have ended, by finish reason.", finished_reason=str(reason)
            )
            for reason in FinishReason
        }
        model_name = self._labels["model_name"]
        self._rejections = {
            limit: self._table.counter(
                "vllm:admission_rejections",
                "Requests that were not let in, by the limit that they met.",
                {"model_name": model_name, "reason": limit},
            )
            for limit in _LIMITS
        }
        seconds = buckets.REQUEST_SECONDS
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time a token after the first.",
            buckets.TOKEN_SECONDS,
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", seconds)
        self._queue = self._histogram("request_queue_time_seconds", "From queued to first scheduled.", seconds)
        self._inference = self._histogram(
            "request_inference_time_seconds", "From first scheduled to the last token.", seconds
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From first scheduled to the first token.", seconds
        )
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", seconds)
        self._request_preemptions = self._histogram(
            "request_num_preemptions", "How often a request lost its KV blocks to others.", buckets.PREEMPTIONS
        )
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", token_counts)
        self._request_prefill = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that had to be computed.", token_counts
        )
        self._request_generation = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", token_counts
        )
        self._request_longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice.", token_counts
        )
        self._params_n = self._histogram("request_params_n", "Choices that a request asked for.", buckets.CHOICES)
        self._params_max_tokens = self._histogram(
            "request_params_max_tokens", "Most tokens that a request asked for.", token_counts
        )

    def _gauge(self, name: str, text: str, **labels: str) -> Gauge:
        return self._table.gauge(f"vllm:{name}", text, self._labels | labels)

    def _counter(self, name: str, text: str, **labels: str) -> Counter:
        return self._table.counter(f"vllm:{name}", text, self._labels | labels)

    def _histogram(self, name: str, text: str, bounds: Iterable[float]) -> Histogram:
        return self._table.histogram(f"vllm:{name}", text, self._labels, bounds)

    def on_ready(self, cache_facts: Mapping[str, object], progress: Callable[[], tuple[float, bool]]) -> None:
        """The engine is loaded.

        Args:
            cache_facts: of its KV cache, by the names of vLLM's options.
            progress: tells for how many seconds the step in progress has gone on, and whether it is overdue.
        """
        self._progress.ask = progress
        self._cache_info.labels = {name: str(fact) for name, fact in cache_facts.items()}
        self._cache_info.labels["engine"] = self._labels["engine"]

    def on_step(self, stats: SchedulerStats) -> None:
        """The scheduler's state after a step. Its totals start again from 0 when the engine does. Only one front end is
        to hear of them."""
        before, self._stats = self._stats, stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._waiting_for_room.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_cache_usage)
        self._cache_queries.inc(_grown(before.prefix_cache_queries_total, stats.prefix_cache_queries_total))
        hits = _grown(before.prefix_cache_hits_total, stats.prefix_cache_hits_total)
        self._cache_hits.inc(hits)
        self._device_hits.inc(hits)
        self._preemptions.inc(_grown(before.preemptions_total, stats.preemptions_total))
        if stats.step_tokens:
            self._iteration_tokens.observe(stats.step_tokens)
            self._step_seconds.observe(stats.step_seconds)

    def on_outputs(self, counts: StepCounts) -> None:
        """What a step has brought to this front end."""
        if counts.num_prompt_tokens:
            self._prompt_tokens.inc(counts.num_prompt_tokens)
            self._computed_prompt_tokens.inc(counts.num_prompt_tokens - counts.num_cached_tokens)
            self._cached_prompt_tokens.inc(counts.num_cached_tokens)
            self._prompt_tokens_cached.inc(counts.num_cached_tokens)
        self._generation_tokens.inc(counts.num_generation_tokens)
        for seconds in counts.first_token_seconds:
            self._first_token.observe(seconds)
        for seconds, count in counts.token_seconds.items():
            self._inter_token.observe(seconds, count)

    def on_sequence_finished(self, finished: FinishedSequence) -> None:
        """A choice of a request has ended. Times that it never reached are not counted."""
        times = finished.times
        self._success[finished.reason].inc()
        self._request_prompt.observe(finished.num_prompt_tokens)
        self._request_prefill.observe(finished.num_prompt_tokens - finished.num_cached_tokens)
        self._request_generation.observe(finished.num_generation_tokens)
        self._request_preemptions.observe(times.num_preemptions)
        self._params_max_tokens.observe(finished.max_tokens)
        self._e2e.observe(finished.now - times.arrival_time)
        if not times.scheduled_time:
            return
        self._queue.observe(times.scheduled_time - times.queued_time)
        if not times.first_token_time:
            return
        decode = times.last_token_time - times.first_token_time
        self._prefill.observe(times.first_token_time - times.scheduled_time)
        self._decode.observe(decode)
        self._inference.observe(times.last_token_time - times.scheduled_time)
        if finished.num_generation_tokens > 1:
            self._per_token.observe(decode / (finished.num_generation_tokens - 1))

    def on_rejected(self, limit: str) -> None:
        """A request was not let in: it met this limit, one of the scheduler's settings."""
        self._rejections[limit].inc()

    def on_request_finished(self, finished: FinishedRequest) -> None:
        """All choices of a request have ended."""
        self._params_n.observe(finished.params.n)
        self._request_longest.observe(max(finished.num_generation_tokens))

    def render(self) -> bytes:
        """All series in the text format of ``CONTENT_TYPE``."""
        return generate_latest(self.registry)


class _Info(Collector):
    """Facts as labels of a gauge that is always 1; nothing as long as there are none. Each front end has them all."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self.labels: dict[str, str] = {}

    def collect(self) -> Iterator[Metric]:
        if self.labels:
            shown = GaugeMetricFamily(self._name, self._text, labels=list(self.labels))
            shown.add_metric(list(self.labels.values()), 1)
            yield shown


class _Progress(Collector):
    """How the engine does at this moment, as every front end can see for itself."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self.ask: Callable[[], tuple[float, bool]] | None = None

    def collect(self) -> Iterator[Metric]:
        if self.ask is None:
            return
        seconds, is_overdue = self.ask()
        for name, text, value in (
            ("octavo:step_age_seconds", "Time since the step in progress began; 0 between steps.", seconds),
            (
                "octavo:engine_overdue",
                "1 while a step takes too long, or the engine is silent.",
                is_overdue,
            ),
        ):
            shown = GaugeMetricFamily(name, text, labels=list(self._labels))
            shown.add_metric(list(self._labels.values()), value)
            yield shown


def _grown(before: int, total: int) -> int:
    """What a total has gained; one that fell has started again from 0."""
    return total - before if total >= before else total
