"""Scheduler: what a step is made of, who has to give way, who is refused."""

import pytest

from octavo.core import RequestStatus
from octavo.errors import RequestError
from octavo.types import FinishReason
from tests.core.harness import (
    EOS,
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

# what a step is made of ----------------------------------------------------------------------------------------------


def test_a_request_comes_whole_then_by_increments() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [5, 6, 7], choice_index=2, eos_token_ids=[EOS]))
    first, _ = step(scheduler)
    (new,) = first.scheduled_new_reqs
    assert (new.req_id, new.token_ids, new.num_prompt_tokens) == ("a", [5, 6, 7], 3)
    assert (new.choice_index, new.eos_token_ids, new.num_computed_tokens) == (2, [EOS], 0)
    assert [len(blocks) for blocks in new.block_ids] == [1]
    assert first.scheduled_cached_reqs.req_ids == []

    second, _ = step(scheduler)
    third, _ = step(scheduler)
    assert second.scheduled_new_reqs == third.scheduled_new_reqs == []
    cached = second.scheduled_cached_reqs
    assert (cached.req_ids, cached.new_block_ids) == (["a"], [None])
    assert (cached.num_computed_tokens, cached.num_output_tokens) == ([3], [1])
    cached = third.scheduled_cached_reqs
    assert cached.new_block_ids[0] is not None
    assert (cached.num_computed_tokens, cached.num_output_tokens) == ([4], [2])
    assert [output.step for output in (first, second, third)] == [1, 2, 3]


def test_a_step_shares_no_list_with_the_scheduler() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [5, 6, 7], max_tokens=9))
    first, _ = step(scheduler)
    step(scheduler)
    assert first.scheduled_new_reqs[0].token_ids == [5, 6, 7]
    assert first.scheduled_new_reqs[0].block_ids == ([1],)


@pytest.mark.parametrize(
    ("budget", "chunks"), [(1, [1] * 17), (16, [16, 1]), (17, [17]), (7, [7, 7, 3])], ids=lambda value: str(value)
)
def test_the_budget_cuts_a_prompt_into_chunks(budget: int, chunks: list[int]) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=budget, max_num_seqs=1)
    scheduler.add_request(make_request("a", range(17), max_tokens=3))
    sizes = []
    while scheduler.has_unfinished_requests():
        output, results = step(scheduler)
        sizes.append(scheduled(output)["a"])
        assert (results == {}) == (len(sizes) < len(chunks))
    assert sizes == [*chunks, 1, 1]


def test_the_budget_is_shared_and_running_requests_come_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(make_request("a", range(2), max_tokens=9))
    assert scheduled(step(scheduler)[0]) == {"a": 2}
    scheduler.add_request(make_request("b", range(20)))
    scheduler.add_request(make_request("c", range(100, 105)))
    assert scheduled(step(scheduler)[0]) == {"a": 1, "b": 9}
    assert scheduled(step(scheduler)[0]) == {"a": 1, "b": 9}
    assert scheduled(step(scheduler)[0]) == {"a": 1, "b": 2, "c": 5}
    assert scheduled(step(scheduler)[0]) == {"a": 1, "b": 1, "c": 1}


def test_the_threshold_limits_one_request_and_leaves_the_rest_to_others() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=4, max_num_batched_tokens=10)
    for name in "abc":
        scheduler.add_request(make_request(name, range(9), cache_salt=name))
    assert scheduled(step(scheduler)[0]) == {"a": 4, "b": 4, "c": 2}


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add_request(make_request(name, [1], max_tokens=2))
    assert [list(scheduled(step(scheduler)[0])) for _ in range(3)] == [["a", "b"], ["a", "b"], ["c"]]


def test_priority_decides_who_enters() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    for name, priority, arrival in (("low", 2, 0.0), ("late", 1, 2.0), ("early", 1, 1.0)):
        scheduler.add_request(make_request(name, [1], max_tokens=1, priority=priority, arrival_time=arrival))
    assert [list(scheduled(step(scheduler)[0])) for _ in range(3)] == [["early"], ["late"], ["low"]]


def test_an_empty_step_has_no_number_and_keeps_the_news_for_the_next() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1], max_tokens=9))
    step(scheduler)
    scheduler.abort_requests(["a"])
    empty = scheduler.schedule()
    assert (empty.total_num_scheduled_tokens, empty.finished_req_ids) == (0, [])
    scheduler.add_request(make_request("b", [1]))
    output, _ = step(scheduler)
    assert (output.step, output.finished_req_ids) == (2, ["a"])
    assert step(scheduler)[0].finished_req_ids == []


def test_a_request_that_the_worker_never_saw_is_not_reported_as_finished() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "abc":
        scheduler.add_request(make_request(name, [1], max_tokens=1))
    scheduler.abort_requests(["b"])
    step(scheduler)
    assert step(scheduler)[0].finished_req_ids == ["a"]


# prefixes ------------------------------------------------------------------------------------------------------------


def test_a_cached_prefix_is_not_computed_again_and_is_counted() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(10)))
    assert finish(scheduler)["a"].num_cached_tokens == 0
    before = scheduler.stats().generation_tokens_total
    scheduler.add_request(make_request("b", range(10)))
    output, results = step(scheduler)
    assert scheduled(output) == {"b": 2}
    assert output.scheduled_new_reqs[0].num_computed_tokens == 8
    assert results["b"].num_cached_tokens == 8
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (20, 8)
    assert before > 0
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (20, before + 1)


def test_generated_blocks_are_found_by_who_continues_the_text() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(6), max_tokens=7))
    finish(scheduler)
    # 6 + 7 tokens, the last never computed: three full blocks.
    scheduler.add_request(make_request("b", [*range(6), *[1] * 7, 9]))
    assert finish(scheduler)["b"].num_cached_tokens == 12


def test_without_prefix_caching_nothing_is_looked_up() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    for name in "ab":
        scheduler.add_request(make_request(name, range(10)))
        assert finish(scheduler)[name].num_cached_tokens == 0
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (0, 0)


def test_other_weights_and_other_kv_have_other_hashes() -> None:
    hashes = []
    for changes in ({}, {"fingerprint": "y"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}):
        scheduler = make_scheduler(**changes)
        scheduler.add_request(make_request("a", range(5)))
        step(scheduler)
        hashes.append(scheduler.requests["a"].block_hashes)
    assert all(hashes.count(found) == 1 for found in hashes)


def test_a_failed_request_leaves_nothing_in_the_cache() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(10)))
    _, results = step(scheduler, errors={"a": "NaN logits"})
    assert results["a"].finish_reason is FinishReason.ERROR
    scheduler.add_request(make_request("b", range(10)))
    assert scheduled(step(scheduler)[0]) == {"b": 10}


# admission -----------------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(5)
    with pytest.raises(
        RequestError, match=r"needs 6 KV cache blocks for 10 tokens of prompt and max_tokens 12.*are 5"
    ) as e:
        scheduler.add_request(make_request("a", range(10), max_tokens=12))
    assert e.value.param == "input_tokens"
    # 21 tokens, of which the last is never computed, fit exactly; and it runs to its end.
    scheduler.add_request(make_request("a", range(10), max_tokens=11))
    assert finish(scheduler)["a"].finish_reason is FinishReason.LENGTH


def test_every_group_counts_and_windows_count_as_windows() -> None:
    specs = (full(), sliding(4))
    settings = {"max_num_batched_tokens": 4, "max_num_seqs": 1}
    # Full: 10 blocks for 40 tokens; window: 3 before + chunk of 4, and one block more.
    with pytest.raises(RequestError, match="needs 13 KV cache blocks"):
        make_scheduler(12, *specs, **settings).add_request(make_request("a", range(20), max_tokens=21))
    scheduler = make_scheduler(13, *specs, **settings)
    scheduler.add_request(make_request("a", range(20), max_tokens=21))
    finish(scheduler)


@pytest.mark.parametrize("length", [0, 64, 65])
def test_a_prompt_without_room_for_a_token_is_refused(length: int) -> None:
    with pytest.raises(RequestError, match=f"the prompt has {length} tokens, .* at most 63"):
        make_scheduler().add_request(make_request("a", range(length)))


def test_the_models_length_ends_what_max_tokens_would_not() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(60), max_tokens=1000))
    finish(scheduler)
    assert scheduler.stats().step == 4


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1]))
    with pytest.raises(RequestError, match="'a' is in use") as caught:
        scheduler.add_request(make_request("a", [2]))
    assert caught.value.param == "request_id"
    finish(scheduler)
    scheduler.add_request(make_request("a", [2]))


def test_a_prompt_enters_only_when_all_of_it_fits_beside_the_others() -> None:
    """Eight blocks; "a" needs six in three chunks. "b" needs four: it would fit now, and would have to leave again."""
    scheduler = make_scheduler(8, max_num_batched_tokens=12, long_prefill_token_threshold=8)
    scheduler.add_request(make_request("a", range(24), max_tokens=1))
    scheduler.add_request(make_request("b", range(100, 116), max_tokens=1))
    assert scheduled(step(scheduler)[0]) == {"a": 8}
    assert scheduled(step(scheduler)[0]) == {"a": 8}
    assert scheduled(step(scheduler)[0]) == {"a": 8}
    assert scheduled(step(scheduler)[0]) == {"b": 8}
    assert scheduler.stats().preemptions_total == 0


# preemption ----------------------------------------------------------------------------------------------------------


def test_fcfs_preempts_the_latest_and_puts_it_at_the_head_of_the_queue() -> None:
    scheduler = crowded("fcfs", "abc", blocks=4)  # one block is free for three
    scheduler.add_request(make_request("d", [9], max_tokens=1))
    output, _ = step(scheduler)
    assert scheduled(output) == {"a": 1, "b": 1}  # "b" took the block of "c"; nobody new enters such a step
    assert output.preempted_req_ids == ["c"]
    assert scheduler.requests["c"].status is RequestStatus.PREEMPTED
    assert scheduler.waiting.peek().request_id == "c"
    assert [request.request_id for request in scheduler.running] == ["a", "b"]


def test_preempted_requests_keep_the_order_of_arrival() -> None:
    scheduler = make_scheduler(4)
    for order, name in enumerate("abcd"):
        scheduler.add_request(make_request(name, [order] * 4, max_tokens=9, arrival_time=float(order)))
    step(scheduler)
    output, _ = step(scheduler)
    assert scheduled(output) == {"a": 1, "b": 1}
    assert output.preempted_req_ids == ["d", "c"]
    assert scheduler.waiting.pop().request_id == "c"


def test_priority_preempts_the_least_important_even_if_it_is_in_the_step_already() -> None:
    """ "low" is first in the batch and gets the only free block; "b" needs one and takes it all back."""
    scheduler = crowded("priority", "lab", {"l": 5}, blocks=4)
    scheduler.running.sort(key=lambda request: request.request_id != "l")
    assert [request.request_id for request in scheduler.running] == ["l", "a", "b"]
    output, _ = step(scheduler)
    assert scheduled(output) == {"a": 1, "b": 1}
    assert output.scheduled_cached_reqs.req_ids == ["a", "b"]
    assert output.preempted_req_ids == ["l"]
    assert output.total_num_scheduled_tokens == 2


def test_tokens_of_a_request_that_was_taken_out_of_the_step_go_to_others() -> None:
    scheduler = make_scheduler(20, policy="priority", max_num_batched_tokens=12, long_prefill_token_threshold=6)
    scheduler.add_request(make_request("l", [0] * 24, max_tokens=9, priority=5))
    assert scheduled(step(scheduler)[0]) == {"l": 6}
    scheduler.add_request(make_request("a", [1] * 8, max_tokens=9, arrival_time=1.0))
    scheduler.add_request(make_request("b", [2] * 20, max_tokens=9, arrival_time=2.0))
    assert scheduled(step(scheduler)[0]) == {"l": 6, "a": 6}
    assert scheduled(step(scheduler)[0]) == {"l": 6, "a": 2, "b": 4}
    pool = scheduler.kv_cache_manager.pool
    pool.get_new_blocks(pool.num_free_blocks - 1)
    # "l" gets six tokens and the last block; "a" needs that block: for "b" six of twelve tokens are left, not five.
    output = scheduler.schedule()
    assert output.preempted_req_ids == ["l"]
    assert scheduled(output) == {"a": 1, "b": 6}


def test_equal_priorities_give_way_by_arrival() -> None:
    scheduler = crowded("priority", "abc", {"a": 1, "b": 1, "c": 1}, blocks=4)
    assert step(scheduler)[0].preempted_req_ids == ["c"]


def test_who_has_to_preempt_itself_leaves_the_step_to_the_others() -> None:
    scheduler = crowded("fcfs", "abc", blocks=5)
    output, _ = step(scheduler)
    assert scheduled(output) == {"a": 1, "b": 1}
    assert output.preempted_req_ids == ["c"]


def test_a_resumed_request_comes_whole_with_what_it_had_generated() -> None:
    scheduler = crowded("fcfs", "ab", blocks=3)
    step(scheduler)
    assert scheduler.requests["b"].status is RequestStatus.PREEMPTED
    scheduler.abort_requests(["a"])
    resumed, results = step(scheduler)
    (new,) = resumed.scheduled_new_reqs
    assert (new.req_id, new.token_ids, new.num_prompt_tokens) == ("b", [1, 1, 1, 1, 1], 4)
    # Its block was still in the cache; the request counts hits of its first entry only.
    assert new.num_computed_tokens == 4
    assert results["b"].num_cached_tokens == 0
    assert scheduler.stats().prefix_cache_hits_total == 0
    last = finish(scheduler)["b"]
    assert last.metrics is not None
    assert last.metrics.num_preemptions == scheduler.stats().preemptions_total == 1


def test_the_trace_tells_of_hits_preemptions_and_resumption() -> None:
    scheduler = crowded("fcfs", "ab", blocks=3)
    output = scheduler.schedule()
    trace = scheduler.step_trace(output)
    assert trace["preempted"] == ["b"]
    assert (trace["step"], trace["num_tokens"], trace["num_running"], trace["num_waiting"]) == (2, 1, 1, 1)
    assert (trace["free_blocks"], trace["used_blocks"], trace["hits"]) == (1, 2, 0)
    assert trace["requests"] == [
        {"id": "a", "scheduled": 1, "computed_before": 4, "cached": 0, "resumed": False, "samples": True}
    ]
    scheduler.update_from_output(output, result_of(output, {"a": [1]}))
    scheduler.abort_requests(["a"])
    output = scheduler.schedule()
    trace = scheduler.step_trace(output)
    assert (trace["hits"], trace["finished"], trace["preempted"]) == (4, ["a"], [])
    assert trace["requests"] == [
        {"id": "b", "scheduled": 1, "computed_before": 4, "cached": 4, "resumed": True, "samples": True}
    ]


def test_a_chunk_short_of_the_last_token_does_not_sample() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=3)
    scheduler.add_request(make_request("a", range(4)))
    traces = []
    for _ in range(2):
        output = scheduler.schedule()
        traces.append(scheduler.step_trace(output)["requests"][0])
        scheduler.update_from_output(output, result_of(output, {"a": [1]} if traces[-1]["samples"] else {}))
    assert [(trace["scheduled"], trace["samples"]) for trace in traces] == [(3, False), (1, True)]
