"""The ``vllm:*`` series of one engine, with vLLM's names, labels and meanings, in a registry of their own.

Whoever sees the engine's outputs calls the ``on_*`` methods; nothing here knows where the numbers come from.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

from octavo.metrics import buckets
from octavo.types import FinishReason, RequestMetrics, SchedulerStats

__all__ = ["CONTENT_TYPE", "EngineMetrics"]

_LABELS = ("model_name", "engine")
# Longest request that the token histograms tell apart when nobody says what the model's is.
_LONGEST_REQUEST = 1_000_000


class EngineMetrics:
    """Counts what one engine does.

    Args:
        model_name: label of every series: the first served name.
        engine_index: label of every series.
        registry: where to register; default: a new one.
        max_model_len: tokens; bounds the histograms of tokens a request.
    """

    def __init__(
        self,
        model_name: str,
        engine_index: int = 0,
        registry: CollectorRegistry | None = None,
        max_model_len: int = _LONGEST_REQUEST,
    ) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._label_values = (model_name, str(engine_index))
        self._stats = SchedulerStats()  # what the totals were at the last step
        self._declare_state()
        self._declare_requests(buckets.token_counts(max_model_len))

    def _declare_state(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting to be scheduled.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks in use; 1 is all of them.")
        self._cache_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._preemptions = self._counter("num_preemptions", "Requests that lost their KV blocks to others.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens whose computation is complete.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in a step.", buckets.ITERATION_TOKENS
        )

    def _declare_requests(self, token_counts: Iterable[float]) -> None:
        success = Counter(
            "vllm:request_success",
            "Requests that have ended, by finish reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._success = {reason: success.labels(*self._label_values, str(reason)) for reason in FinishReason}

        seconds, token_seconds = buckets.REQUEST_SECONDS, buckets.TOKEN_SECONDS
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", buckets.TIME_TO_FIRST_TOKEN
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between one token and the next.", token_seconds
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time a token after its first.", token_seconds
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
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", token_counts)
        self._request_generation = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", token_counts
        )
        self._params_n = self._histogram("request_params_n", "Choices that a request asked for.", buckets.CHOICES)
        self._params_max_tokens = self._histogram(
            "request_params_max_tokens", "Most tokens that a request asked for.", token_counts
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(*self._label_values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(*self._label_values)

    def _histogram(self, name: str, text: str, bounds: Iterable[float]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=tuple(bounds))
        return histogram.labels(*self._label_values)

    def on_step(self, stats: SchedulerStats) -> None:
        """The scheduler's state after a step. Its totals start again from 0 when the engine does."""
        before, self._stats = self._stats, stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_cache_usage)
        self._cache_queries.inc(_grown(before.prefix_cache_queries_total, stats.prefix_cache_queries_total))
        self._cache_hits.inc(_grown(before.prefix_cache_hits_total, stats.prefix_cache_hits_total))
        self._preemptions.inc(_grown(before.preemptions_total, stats.preemptions_total))
        if stats.step_tokens:
            self._iteration_tokens.observe(stats.step_tokens)

    def on_request(self, n: int, max_tokens: int) -> None:
        """A request with these parameters was accepted."""
        self._params_n.observe(n)
        self._params_max_tokens.observe(max_tokens)

    def on_outputs(self, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Sums over one step: prompts whose computation it completed, and tokens that it generated."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._generation_tokens.inc(num_generation_tokens)

    def on_first_token(self, seconds: float) -> None:
        """Time from a request's arrival to its first token."""
        self._first_token.observe(seconds)

    def on_inter_token(self, seconds_per_token: float, num_tokens: int) -> None:
        """``num_tokens`` came at once, so long after the ones before that each took ``seconds_per_token``."""
        for _ in range(num_tokens):
            self._inter_token.observe(seconds_per_token)

    def on_finished(
        self,
        reason: FinishReason,
        metrics: RequestMetrics,
        num_prompt_tokens: int,
        num_generation_tokens: int,
        now: float,
    ) -> None:
        """A request has ended at ``now``. Times that it never reached are not counted."""
        self._success[reason].inc()
        self._request_prompt.observe(num_prompt_tokens)
        self._request_generation.observe(num_generation_tokens)
        self._e2e.observe(now - metrics.arrival_time)
        if not metrics.scheduled_time:
            return
        self._queue.observe(metrics.scheduled_time - metrics.queued_time)
        if not metrics.first_token_time:
            return
        decode = metrics.last_token_time - metrics.first_token_time
        self._prefill.observe(metrics.first_token_time - metrics.scheduled_time)
        self._decode.observe(decode)
        self._inference.observe(metrics.last_token_time - metrics.scheduled_time)
        if num_generation_tokens > 1:
            self._per_token.observe(decode / (num_generation_tokens - 1))

    def render(self) -> bytes:
        """All series in the text format of ``CONTENT_TYPE``."""
        return generate_latest(self.registry)


def _grown(before: int, total: int) -> int:
    """What a total has gained; one that fell has started again from 0."""
    return total - before if total >= before else total
