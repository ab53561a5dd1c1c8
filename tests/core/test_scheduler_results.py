"""Scheduler: what becomes of a step's results, of aborts, and of steps in flight."""

import time

import pytest

from octavo.core import Scheduler
from octavo.types import NO_TOKEN_LEFT, FinishReason, PositionLogprobs, SchedulerOutput
from tests.core.harness import (
    check_scheduler,
    crowded,
    finish,
    full,
    make_request,
    make_scheduler,
    result_of,
    scheduled,
    sliding,
    step,
)
from tests.core.simulation import Simulation, expected_tokens

# results -------------------------------------------------------------------------------------------------------------


def test_tokens_and_logprobs_after_a_stop_are_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1], stop_token_ids=[3], max_tokens=9, logprobs=0))
    output = scheduler.schedule()
    entries = [PositionLogprobs([token], [-1.0], 1) for token in (2, 3, 4)]
    result = result_of(output, {"a": [2, 3, 4]})
    result.logprobs = [entries]
    (entry,) = scheduler.update_from_output(output, result)[0].outputs
    assert (entry.new_token_ids, entry.new_logprobs) == ([2, 3], entries[:2])
    assert (entry.finish_reason, entry.stop_reason) == (FinishReason.STOP, 3)
    check_scheduler(scheduler)


def test_several_tokens_a_step_are_computed_together_in_the_next() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1, 2], max_tokens=9))
    step(scheduler, {"a": [5, 6, 7]})
    output, _ = step(scheduler)
    assert scheduled(output) == {"a": 3}
    assert output.scheduled_cached_reqs.num_computed_tokens == [2]
    assert output.scheduled_cached_reqs.num_output_tokens == [3]


def test_a_step_without_the_expected_token_is_done_again() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(4), max_tokens=9))
    _, results = step(scheduler, {"a": []})
    assert results == {}
    output, results = step(scheduler)
    assert scheduled(output) == {"a": 1}
    assert output.scheduled_cached_reqs.num_computed_tokens == [3]
    assert output.scheduled_cached_reqs.num_output_tokens == [0]
    assert results["a"].new_token_ids == [1]


def test_a_failed_request_ends_alone() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add_request(make_request(name, [1], max_tokens=9))
    _, results = step(scheduler, errors={"a": "NaN logits"})
    assert (results["a"].finish_reason, results["a"].error) == (FinishReason.ERROR, "NaN logits")
    assert results["a"].new_token_ids == []
    assert results["b"].finish_reason is None
    output, _ = step(scheduler)
    assert (scheduled(output), output.finished_req_ids) == ({"b": 1}, ["a"])


@pytest.mark.parametrize(("error", "cached"), [("NaN logits", 0), (NO_TOKEN_LEFT, 32)])
def test_what_was_computed_for_a_request_that_failed_is_found_no_longer_unless_that_was_the_clients_doing(
    error: str, cached: int
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    scheduler.add_request(make_request("a", range(40), max_tokens=9))
    step(scheduler)  # two blocks, computed and findable
    step(scheduler, errors={"a": error})
    scheduler.add_request(make_request("b", range(40), max_tokens=1))
    assert finish(scheduler)["b"].num_cached_tokens == cached
    check_scheduler(scheduler)
    assert scheduler.kv_cache_manager.usage == 0


def test_outputs_go_to_their_front_ends_and_stats_always_to_the_first() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1], client_index=2))
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, result_of(output, {"a": [1]}))
    assert {client: len(message.outputs) for client, message in outputs.items()} == {0: 0, 2: 1}
    stats = outputs[0].scheduler_stats
    assert stats is not None
    assert (stats.step, stats.step_tokens, stats.num_running, stats.num_waiting) == (1, 1, 1, 0)
    assert stats.kv_cache_usage == pytest.approx(1 / 64)
    # The others would count the engine's totals once more.
    assert outputs[2].scheduler_stats is None
    aborted = scheduler.abort_requests(["a"])
    assert aborted[2].scheduler_stats is None
    stats = aborted[0].scheduler_stats  # no step may come after it that would tell
    assert stats is not None
    assert (stats.num_running, stats.kv_cache_usage) == (0, 0)


def test_times_of_a_request_are_in_order() -> None:
    scheduler = make_scheduler()
    before = time.monotonic()
    scheduler.add_request(make_request("a", [1], arrival_time=before, max_tokens=3))
    metrics = finish(scheduler)["a"].metrics
    assert metrics is not None
    moments = [
        metrics.arrival_time,
        metrics.queued_time,
        metrics.scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
        time.monotonic(),
    ]
    assert moments == sorted(moments)
    assert metrics.first_token_time < metrics.last_token_time


# aborts, and steps in flight -----------------------------------------------------------------------------------------


def test_aborts_end_requests_wherever_they_are() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for client, name in enumerate("abc"):
        scheduler.add_request(make_request(name, [1], max_tokens=9, client_index=client))
    step(scheduler)
    outputs = scheduler.abort_requests(["a", "c", "unknown", "a"])
    assert {client: [e.request_id for e in message.outputs] for client, message in outputs.items()} == {
        0: ["a"],
        2: ["c"],
    }
    assert all(e.finish_reason is FinishReason.ABORT for message in outputs.values() for e in message.outputs)
    check_scheduler(scheduler)
    assert scheduler.num_unfinished == 1
    output, _ = step(scheduler)
    assert (scheduled(output), output.finished_req_ids) == ({"b": 1}, ["a"])
    assert scheduler.abort_requests(["unknown"]) == {}


def in_flight(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    check_scheduler(scheduler)
    return output


def test_the_next_step_is_scheduled_before_the_token_is_known() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [7, 8], max_tokens=3))
    first, second, third = in_flight(scheduler), in_flight(scheduler), in_flight(scheduler)
    assert [scheduled(output) for output in (first, second, third)] == [{"a": 2}, {"a": 1}, {"a": 1}]
    assert third.scheduled_cached_reqs.num_computed_tokens == [3]
    assert third.scheduled_cached_reqs.num_output_tokens == [2]
    # max_tokens are on their way: there is nothing more to compute.
    assert in_flight(scheduler).total_num_scheduled_tokens == 0
    ended = [
        scheduler.update_from_output(output, result_of(output, {"a": [1]}))[0].outputs[0].finish_reason
        for output in (first, second, third)
    ]
    assert ended == [None, None, FinishReason.LENGTH]


def test_what_was_computed_beyond_a_stop_is_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [7, 8], max_tokens=9, stop_token_ids=[3]))
    first, second = in_flight(scheduler), in_flight(scheduler)
    (entry,) = scheduler.update_from_output(first, result_of(first, {"a": [3]}))[0].outputs
    assert entry.finish_reason is FinishReason.STOP
    assert scheduler.update_from_output(second, result_of(second, {"a": [4]}))[0].outputs == []
    check_scheduler(scheduler)
    assert not scheduler.has_unfinished_requests()


def test_placeholders_are_never_hashed() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(3), max_tokens=9))
    outputs = [in_flight(scheduler) for _ in range(4)]
    assert scheduler.kv_cache_manager.pool.num_cached_blocks == 0
    for output in outputs[:2]:
        scheduler.update_from_output(output, result_of(output, {"a": [1]}))
    # Tokens 0 to 3 are computed and known, 4 and 5 are in flight.
    assert len(scheduler.requests["a"].block_hashes) == scheduler.kv_cache_manager.pool.num_cached_blocks == 1


def test_a_result_in_flight_is_not_given_to_another_request_of_the_same_id() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [7, 8], max_tokens=3))
    old = in_flight(scheduler)
    scheduler.abort_requests(["a"])
    scheduler.add_request(make_request("a", [5], max_tokens=3))
    # It comes while the new one waits, or when that is in the batch already.
    assert scheduler.update_from_output(old, result_of(old, {"a": [1]}))[0].outputs == []
    new = in_flight(scheduler)
    assert (new.finished_req_ids, [r.req_id for r in new.scheduled_new_reqs]) == (["a"], ["a"])
    assert scheduler.update_from_output(old, result_of(old, {"a": [1]}))[0].outputs == []
    (entry,) = scheduler.update_from_output(new, result_of(new, {"a": [2]}))[0].outputs
    assert entry.new_token_ids == [2]


def test_a_result_in_flight_of_a_preempted_request_is_dropped() -> None:
    scheduler = crowded("fcfs", "ab", blocks=3)
    scheduler.abort_requests(["a"])
    flying = in_flight(scheduler)
    assert scheduled(flying) == {"b": 1}
    # "c" takes what is left, "b" needs a block three tokens later, with its steps in flight: it is the older.
    scheduler.add_request(make_request("c", [9] * 3, max_tokens=5))
    steps = [in_flight(scheduler) for _ in range(5)]
    assert [request_id for output in steps for request_id in output.preempted_req_ids] == ["c"]
    for output in (flying, *steps):
        results = scheduler.update_from_output(output, result_of(output, {name: [1] for name in scheduled(output)}))
        assert "c" not in [entry.request_id for entry in results[0].outputs]
        check_scheduler(scheduler)
    assert scheduler.requests["c"].token_ids == [9] * 3


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_long_prompt_and_many_short_ones_all_end_with_their_own_tokens(depth: int, policy: str) -> None:
    simulation = Simulation.make(
        40, [full(4), sliding(7, 4)], depth=depth, max_model_len=64, max_num_batched_tokens=12, policy=policy
    )
    requests = [make_request("long", range(40), max_tokens=20, priority=1)]
    requests += [make_request(f"r{n}", [n] * 5, max_tokens=12, arrival_time=float(n)) for n in range(6)]
    for request in requests:
        assert simulation.add(request)
    simulation.drain()
    assert len(simulation.finished) == len(requests)
    simulation.check_outputs()
    assert simulation.preemptions >= 1
    # The control: the check would notice a wrong token.
    request, tokens, reason = simulation.finished[0]
    simulation.finished[0] = (request, [*tokens[:-1], tokens[-1] + 1], reason)
    with pytest.raises(AssertionError):
        simulation.check_outputs()
    assert expected_tokens(request, 64) == (tokens, reason)


def test_the_prefix_cache_is_reset_when_nothing_runs() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(10)))
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    finish(scheduler)
    assert scheduler.reset_prefix_cache()
    scheduler.add_request(make_request("b", range(10)))
    assert finish(scheduler)["b"].num_cached_tokens == 0
