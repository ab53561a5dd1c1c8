"""Scheduler: the logprobs of a prompt are delivered from its beginning, each position once, whatever happens."""

from octavo.core import Scheduler
from octavo.types import EngineCoreOutput, FinishReason, PositionLogprobs, PromptLogprobs, SchedulerOutput
from tests.core.harness import check_scheduler, crowded, finish, make_request, make_scheduler, result_of, scheduled


def entries(start: int, stop: int) -> list[PositionLogprobs]:
    return [PositionLogprobs([position], [-1.0], 1) for position in range(start, stop)]


def step(
    scheduler: Scheduler, tokens: dict[str, list[int]] | None = None, **parts: PromptLogprobs
) -> tuple[SchedulerOutput, dict[str, EngineCoreOutput]]:
    """A step that computes ``parts`` of prompt logprobs."""
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, result_of(output, tokens or {}, prompt_logprobs=parts))
    check_scheduler(scheduler)
    return output, {entry.request_id: entry for message in outputs.values() for entry in message.outputs}


def test_a_step_that_samples_nothing_delivers_what_it_has_computed() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_request("a", range(6), prompt_logprobs=1))
    _, first = step(scheduler, a=PromptLogprobs(1, entries(1, 5)))
    assert (first["a"].new_token_ids, first["a"].new_prompt_logprobs) == ([], entries(1, 5))
    assert first["a"].metrics is None
    _, second = step(scheduler, {"a": [3]}, a=PromptLogprobs(5, entries(5, 6)))
    assert (second["a"].new_token_ids, second["a"].new_prompt_logprobs) == ([3], entries(5, 6))
    assert finish(scheduler)["a"].new_prompt_logprobs is None


def test_they_come_with_the_last_output_of_a_request_that_ends_at_once() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(3), prompt_logprobs=0, max_tokens=1))
    _, outputs = step(scheduler, {"a": [3]}, a=PromptLogprobs(1, entries(1, 3)))
    assert (outputs["a"].finish_reason, outputs["a"].new_prompt_logprobs) == (FinishReason.LENGTH, entries(1, 3))


def test_a_request_that_asks_writes_the_prefix_cache_and_does_not_read_it() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add_request(make_request(name, range(9), max_tokens=1, prompt_logprobs=1))
        output, _ = step(scheduler, {name: [1]}, **{name: PromptLogprobs(1, entries(1, 9))})
        assert scheduled(output) == {name: 9}
    assert scheduler.stats().prefix_cache_queries_total == 0
    scheduler.add_request(make_request("c", range(9), max_tokens=1))
    assert scheduled(step(scheduler, {"c": [1]})[0]) == {"c": 1}
    assert scheduler.stats().prefix_cache_hits_total == 8


def test_a_prompt_of_one_token_has_none() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [7], prompt_logprobs=1))
    output, outputs = step(scheduler, {"a": [1]})
    assert output.scheduled_new_reqs[0].sampling_params.prompt_logprobs is None  # nothing to compute
    assert outputs["a"].new_prompt_logprobs is None


def preempt(scheduler: Scheduler) -> None:
    """Takes "a" out of the batch, as if another had needed its blocks."""
    request = scheduler.requests["a"]
    scheduler.running.remove(request)
    scheduler._preempt(request)


def test_after_a_preemption_in_the_middle_of_the_prompt_only_the_rest_is_delivered() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_request("a", range(10), prompt_logprobs=1))
    step(scheduler, a=PromptLogprobs(1, entries(1, 5)))
    preempt(scheduler)
    output, again = step(scheduler, a=PromptLogprobs(1, entries(1, 5)))
    # Nothing from the cache, where its first block is: what is missing must be computed from the beginning.
    assert output.scheduled_new_reqs[0].num_computed_tokens == 0
    assert output.scheduled_new_reqs[0].sampling_params.prompt_logprobs == 1
    assert again == {}
    _, second = step(scheduler, a=PromptLogprobs(5, entries(5, 9)))
    assert second["a"].new_prompt_logprobs == entries(5, 9)


def test_after_a_preemption_behind_the_prompt_none_are_computed_and_the_cache_is_read() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(10), prompt_logprobs=1, max_tokens=9))
    step(scheduler, {"a": [1]}, a=PromptLogprobs(1, entries(1, 10)))
    preempt(scheduler)
    output, _ = step(scheduler, {"a": [1]})
    assert output.scheduled_new_reqs[0].num_computed_tokens == 8
    assert output.scheduled_new_reqs[0].sampling_params.prompt_logprobs is None
    assert scheduler.requests["a"].core_request.sampling_params.prompt_logprobs == 1


def test_results_in_flight_of_a_preempted_request_deliver_nothing() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_request("a", range(10), prompt_logprobs=1))
    flying = scheduler.schedule()
    preempt(scheduler)
    result = result_of(flying, {}, prompt_logprobs={"a": PromptLogprobs(1, entries(1, 5))})
    assert scheduler.update_from_output(flying, result)[0].outputs == []
    _, outputs = step(scheduler, a=PromptLogprobs(1, entries(1, 5)))
    assert outputs["a"].new_prompt_logprobs == entries(1, 5)


def test_those_who_do_not_ask_get_none() -> None:
    scheduler = crowded("fcfs", "ab", blocks=8)
    assert all(entry.new_prompt_logprobs is None for entry in step(scheduler, {"a": [1], "b": [1]})[1].values())
