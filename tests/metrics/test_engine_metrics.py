"""EngineMetrics: vLLM's names, what each call counts, and what the scrape looks like."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.metrics import CONTENT_TYPE, EngineMetrics
from octavo.types import (
    FinishedRequest,
    FinishedSequence,
    FinishReason,
    RequestMetrics,
    SamplingParams,
    SchedulerStats,
    StepCounts,
)

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


def test_every_series_is_there_from_the_start(metrics: EngineMetrics) -> None:
    # docs/metrics.md has them all: see test_documentation.
    zero = {name for (name, labels), value in Scrape(metrics).samples.items() if name.startswith("vllm:") and not value}
    assert {"vllm:num_requests_running", "vllm:generation_tokens_total", "vllm:request_success_total"} <= zero
    for reason in ("stop", "length", "abort", "error"):
        assert Scrape(metrics)("request_success_total", finished_reason=reason) == 0


def test_gauges_show_the_last_step_and_counters_its_growth(metrics: EngineMetrics) -> None:
    metrics.on_step(
        SchedulerStats(
            step=1,
            num_running=2,
            num_waiting=3,
            kv_cache_usage=0.25,
            prefix_cache_queries_total=10,
            step_tokens=7,
            step_seconds=0.25,
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
    assert scrape("prompt_tokens_cached_by_source_total", source="device") == 16
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


def test_a_step_counts_its_tokens_and_how_long_each_was_waited_for(metrics: EngineMetrics) -> None:
    metrics.on_outputs(StepCounts(5, 2, 2, [0.03], {}))
    metrics.on_outputs(StepCounts(0, 0, 3, [], {0.02: 2, 0.5: 1}))
    scrape = Scrape(metrics)
    assert (scrape("prompt_tokens_total"), scrape("generation_tokens_total")) == (5, 5)
    assert scrape("prompt_tokens_by_source_total", source="local_compute") == 3
    assert scrape("prompt_tokens_by_source_total", source="local_cache_hit") == 2
    assert scrape("prompt_tokens_cached_total") == 2
    assert scrape("time_to_first_token_seconds_bucket", le="0.02") == 0
    assert scrape("time_to_first_token_seconds_bucket", le="0.04") == 1
    assert scrape("inter_token_latency_seconds_bucket", le="0.01") == 0
    assert scrape("inter_token_latency_seconds_bucket", le="0.025") == 2
    assert scrape("inter_token_latency_seconds_count") == 3
    assert scrape("inter_token_latency_seconds_sum") == pytest.approx(0.54)


def test_a_value_on_a_bound_belongs_to_the_bucket_below(metrics: EngineMetrics) -> None:
    metrics.on_outputs(StepCounts(token_seconds={0.025: 1, 81.0: 1}))
    scrape = Scrape(metrics)
    assert scrape("inter_token_latency_seconds_bucket", le="0.025") == 1
    assert scrape("inter_token_latency_seconds_bucket", le="80.0") == 1
    assert scrape("inter_token_latency_seconds_bucket", le="+Inf") == 2


def finished(reason: FinishReason, times: RequestMetrics, num_tokens: int, now: float) -> FinishedSequence:
    return FinishedSequence(reason, times, 7, 4, num_tokens, max_tokens=64, now=now)


def test_a_finished_request_is_divided_into_its_phases(metrics: EngineMetrics) -> None:
    times = RequestMetrics(
        arrival_time=100.0,
        queued_time=100.5,
        scheduled_time=101.5,
        first_token_time=103.5,
        last_token_time=107.5,
        num_preemptions=2,
    )
    metrics.on_sequence_finished(finished(FinishReason.LENGTH, times, 5, now=108.0))
    scrape = Scrape(metrics)
    assert scrape("request_success_total", finished_reason="length") == 1
    assert scrape("e2e_request_latency_seconds_sum") == 8.0
    assert scrape("request_queue_time_seconds_sum") == 1.0
    assert scrape("request_prefill_time_seconds_sum") == 2.0
    assert scrape("request_decode_time_seconds_sum") == 4.0
    assert scrape("request_inference_time_seconds_sum") == 6.0
    assert scrape("request_time_per_output_token_seconds_sum") == 1.0
    assert (scrape("request_prompt_tokens_sum"), scrape("request_generation_tokens_sum")) == (7, 5)
    assert scrape("request_prefill_kv_computed_tokens_sum") == 3
    assert (scrape("request_num_preemptions_sum"), scrape("request_params_max_tokens_sum")) == (2, 64)


def test_a_request_counts_once_and_its_choices_each(metrics: EngineMetrics) -> None:
    request = FinishedRequest(
        "r", SamplingParams(n=2), RequestMetrics(), 7, [3, 5], ["stop", "length"], None, None, now=1.0
    )
    metrics.on_request_finished(request)
    scrape = Scrape(metrics)
    assert (scrape("request_params_n_count"), scrape("request_params_n_sum")) == (1, 2)
    assert scrape("request_max_num_generation_tokens_sum") == 5


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
    metrics.on_sequence_finished(finished(FinishReason.ABORT, times, 0, now=4.0))
    scrape = Scrape(metrics)
    assert scrape("e2e_request_latency_seconds_count") == 1
    assert (scrape("request_queue_time_seconds_count"), scrape("request_prefill_time_seconds_count")) == phases


def test_token_histograms_reach_as_far_as_the_model(metrics: EngineMetrics) -> None:
    scrape = Scrape(metrics)
    bounds = [dict(labels)["le"] for name, labels in scrape.samples if name == "vllm:request_prompt_tokens_bucket"]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "+Inf"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
        ("gpu_prefix_cache_queries_total", "prefix_cache_queries_total"),
        ("gpu_prefix_cache_hits_total", "prefix_cache_hits_total"),
        ("time_per_output_token_seconds_count", "inter_token_latency_seconds_count"),
        ("time_per_output_token_seconds_sum", "inter_token_latency_seconds_sum"),
    ],
)
def test_old_names_that_dashboards_know_tell_the_same(metrics: EngineMetrics, old: str, new: str) -> None:
    metrics.on_step(SchedulerStats(kv_cache_usage=0.5, prefix_cache_queries_total=4, prefix_cache_hits_total=3))
    metrics.on_outputs(StepCounts(token_seconds={0.5: 2}))
    scrape = Scrape(metrics)
    assert scrape(old) == scrape(new) > 0


def test_the_size_of_the_cache_is_told_when_it_is_known(metrics: EngineMetrics) -> None:
    assert b"cache_config_info" not in metrics.render()
    metrics.on_ready({"block_size": 16, "num_gpu_blocks": 9}, lambda: (0.5, False))
    assert 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="9"} 1.0' in metrics.render().decode()


def test_the_step_in_progress_is_looked_at_when_somebody_asks(metrics: EngineMetrics) -> None:
    assert b"octavo:step_age_seconds" not in metrics.render()
    state = [(0.0, False), (70.5, True)]
    metrics.on_ready({}, lambda: state.pop())
    labels = 'engine="0",model_name="m"'
    for seconds, overdue in (("70.5", "1.0"), ("0.0", "0.0")):
        lines = metrics.render().decode().splitlines()
        assert f"octavo:step_age_seconds{{{labels}}} {seconds}" in lines
        assert f"octavo:engine_overdue{{{labels}}} {overdue}" in lines


def test_two_engines_in_one_process_do_not_meet() -> None:
    first, second = EngineMetrics("m"), EngineMetrics("m")
    first.on_outputs(StepCounts(1, 0, 1))
    assert Scrape(second)("prompt_tokens_total") == 0
    assert Scrape(first)("prompt_tokens_total") == 1
    assert CONTENT_TYPE.startswith("text/plain")
