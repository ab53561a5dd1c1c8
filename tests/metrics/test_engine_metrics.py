"""EngineMetrics: vLLM's names, what each call counts, and what the scrape looks like."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.metrics import CONTENT_TYPE, EngineMetrics
from octavo.types import FinishReason, RequestMetrics, SchedulerStats

LABELS = {"model_name": "m", "engine": "0"}


class Scrape:
    """The rendered text, by sample name and labels."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self.samples = {}
        for family in text_string_to_metric_families(metrics.render().decode()):
            for sample in family.samples:
                self.samples[sample.name, frozenset(sample.labels.items())] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[f"vllm:{name}", frozenset((LABELS | labels).items())]


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("m", max_model_len=512)


def test_every_core_series_is_there_from_the_start_under_the_names_that_vllm_gives_them(metrics: EngineMetrics) -> None:
    scrape = Scrape(metrics)
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert scrape(gauge) == 0
    for counter in (
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
    ):
        assert scrape(f"{counter}_total") == 0
    for histogram in (
        "iteration_tokens_total",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    ):
        assert scrape(f"{histogram}_count") == 0
    for reason in ("stop", "length", "abort", "error"):
        assert scrape("request_success_total", finished_reason=reason) == 0


def test_gauges_show_the_last_step_and_counters_its_growth(metrics: EngineMetrics) -> None:
    metrics.on_step(
        SchedulerStats(
            step=1, num_running=2, num_waiting=3, kv_cache_usage=0.25, prefix_cache_queries_total=10, step_tokens=7
        )
    )
    metrics.on_step(
        SchedulerStats(
            step=2,
            num_running=1,
            kv_cache_usage=0.5,
            prefix_cache_queries_total=30,
            prefix_cache_hits_total=16,
            preemptions_total=2,
            step_tokens=1,
        )
    )
    scrape = Scrape(metrics)
    assert (scrape("num_requests_running"), scrape("num_requests_waiting")) == (1, 0)
    assert scrape("kv_cache_usage_perc") == 0.5
    assert scrape("prefix_cache_queries_total") == 30
    assert scrape("prefix_cache_hits_total") == 16
    assert scrape("num_preemptions_total") == 2
    assert scrape("iteration_tokens_total_sum") == 8
    assert scrape("iteration_tokens_total_bucket", le="1.0") == 1


def test_a_total_that_started_again_is_counted_from_zero(metrics: EngineMetrics) -> None:
    metrics.on_step(SchedulerStats(preemptions_total=5))
    metrics.on_step(SchedulerStats(preemptions_total=2))
    assert Scrape(metrics)("num_preemptions_total") == 7


def test_a_step_without_tokens_is_no_iteration(metrics: EngineMetrics) -> None:
    metrics.on_step(SchedulerStats(step=1))
    assert Scrape(metrics)("iteration_tokens_total_count") == 0


def test_tokens_and_latencies(metrics: EngineMetrics) -> None:
    metrics.on_request(n=2, max_tokens=64)
    metrics.on_outputs(num_prompt_tokens=5, num_generation_tokens=2)
    metrics.on_outputs(num_prompt_tokens=0, num_generation_tokens=1)
    metrics.on_first_token(0.03)
    metrics.on_inter_token(0.02, num_tokens=3)
    scrape = Scrape(metrics)
    assert (scrape("prompt_tokens_total"), scrape("generation_tokens_total")) == (5, 3)
    assert scrape("time_to_first_token_seconds_bucket", le="0.02") == 0
    assert scrape("time_to_first_token_seconds_bucket", le="0.04") == 1
    assert scrape("inter_token_latency_seconds_count") == 3
    assert scrape("inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert (scrape("request_params_n_sum"), scrape("request_params_max_tokens_sum")) == (2, 64)


def test_a_finished_request_is_divided_into_its_phases(metrics: EngineMetrics) -> None:
    times = RequestMetrics(
        arrival_time=100.0, queued_time=100.5, scheduled_time=101.5, first_token_time=103.5, last_token_time=107.5
    )
    metrics.on_finished(FinishReason.LENGTH, times, num_prompt_tokens=7, num_generation_tokens=5, now=108.0)
    scrape = Scrape(metrics)
    assert scrape("request_success_total", finished_reason="length") == 1
    assert scrape("e2e_request_latency_seconds_sum") == 8.0
    assert scrape("request_queue_time_seconds_sum") == 1.0
    assert scrape("request_prefill_time_seconds_sum") == 2.0
    assert scrape("request_decode_time_seconds_sum") == 4.0
    assert scrape("request_inference_time_seconds_sum") == 6.0
    assert scrape("request_time_per_output_token_seconds_sum") == 1.0
    assert (scrape("request_prompt_tokens_sum"), scrape("request_generation_tokens_sum")) == (7, 5)


@pytest.mark.parametrize(
    ("times", "phases"),
    [
        (RequestMetrics(arrival_time=1.0, queued_time=1.0), (0, 0)),
        (RequestMetrics(arrival_time=1.0, queued_time=1.0, scheduled_time=2.0), (1, 0)),
        (RequestMetrics(arrival_time=1.0, queued_time=1.0, scheduled_time=2.0, first_token_time=3.0), (1, 1)),
    ],
)
def test_phases_that_an_aborted_request_never_reached_are_not_counted(
    metrics: EngineMetrics, times: RequestMetrics, phases: tuple[int, int]
) -> None:
    metrics.on_finished(FinishReason.ABORT, times, 7, 0, now=4.0)
    scrape = Scrape(metrics)
    assert scrape("e2e_request_latency_seconds_count") == 1
    assert (scrape("request_queue_time_seconds_count"), scrape("request_prefill_time_seconds_count")) == phases


def test_token_histograms_reach_as_far_as_the_model(metrics: EngineMetrics) -> None:
    scrape = Scrape(metrics)
    bounds = [dict(labels)["le"] for name, labels in scrape.samples if name == "vllm:request_prompt_tokens_bucket"]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "+Inf"]


def test_two_engines_in_one_registry_of_their_own_do_not_meet() -> None:
    first, second = EngineMetrics("m"), EngineMetrics("m")
    first.on_outputs(1, 1)
    assert Scrape(second)("prompt_tokens_total") == 0
    assert CONTENT_TYPE.startswith("text/plain")
