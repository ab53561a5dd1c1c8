"""Admission: what counts as waiting, who is refused, and that it is all of a request or none."""

import time
from typing import Any

import pytest

from octavo.config import EngineArgs
from octavo.core import Scheduler
from octavo.errors import ConfigError, OverloadedError
from tests.core.harness import crowded, finish, make_request, make_scheduler, scheduled, step


def add(scheduler: Scheduler, names: str, length: int = 2, **fields: Any) -> None:
    for name in names:
        scheduler.add_request(make_request(name, [ord(name)] * length, **fields))


def refused(scheduler: Scheduler, *names: str, length: int = 2) -> OverloadedError:
    before = dict(scheduler.requests), list(scheduler.waiting)
    with pytest.raises(OverloadedError) as caught:
        scheduler.add_request(*(make_request(name, [1] * length) for name in names))
    assert (scheduler.requests, list(scheduler.waiting)) == before
    return caught.value


def test_without_limits_nothing_is_refused() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "abcdefghij")
    assert len(scheduler.waiting) == 10


def test_requests_beyond_the_limit_are_refused() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_queued_reqs=3)
    add(scheduler, "abcde")  # two have seats in the next step
    error = refused(scheduler, "f")
    assert "4 requests would wait, and at most 3 may (--max-num-queued-reqs)" in str(error)
    assert scheduled(step(scheduler)[0]).keys() == {"a", "b"}
    refused(scheduler, "f")


def test_requests_that_enter_at_once_do_not_wait() -> None:
    """However many come before the next step is made up."""
    scheduler = make_scheduler(max_num_seqs=8, max_num_queued_reqs=1)
    add(scheduler, "abcdefgh")
    add(scheduler, "i")
    refused(scheduler, "j")
    assert len(scheduled(step(scheduler)[0])) == 8


def test_a_seat_that_becomes_free_makes_room() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_reqs=1)
    add(scheduler, "a", max_tokens=1)
    add(scheduler, "b")
    refused(scheduler, "c")
    step(scheduler)  # a is done; b has the seat that it leaves
    add(scheduler, "c")
    refused(scheduler, "d")
    assert set(finish(scheduler)) == {"b", "c"}


def test_an_abort_makes_room_whether_it_waited_or_ran() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_reqs=2)
    add(scheduler, "abc")
    step(scheduler)
    refused(scheduler, "d")
    scheduler.abort_requests(["c"])
    add(scheduler, "d")
    refused(scheduler, "e")
    scheduler.abort_requests(["a"])
    add(scheduler, "e")
    refused(scheduler, "f")


def test_tokens_that_the_next_step_has_no_room_for_wait() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, max_num_queued_reqs=1)
    add(scheduler, "a", length=8)
    add(scheduler, "b", length=8)  # its first two tokens are in the next step
    add(scheduler, "c", length=8)
    refused(scheduler, "d")
    assert scheduled(step(scheduler)[0]) == {"a": 8, "b": 2}


def test_requests_that_the_kv_cache_has_no_room_for_wait() -> None:
    """Free seats are of no use to them."""
    scheduler = make_scheduler(4, max_num_seqs=8, max_num_queued_reqs=1)
    add(scheduler, "a", length=12)
    add(scheduler, "b", length=8)
    refused(scheduler, "c", length=1)  # would fit, but nobody overtakes
    step(scheduler)
    refused(scheduler, "c", length=1)
    assert set(finish(scheduler)) == {"a", "b"}


def test_what_the_prefix_cache_supplies_takes_no_room_in_the_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20, max_num_queued_reqs=1)
    scheduler.add_request(make_request("first", [1] * 16, max_tokens=1))
    finish(scheduler)
    for name in "abc":
        scheduler.add_request(make_request(name, [1] * 16))
    scheduler.add_request(make_request("d", [1] * 16))
    assert len(scheduled(step(scheduler)[0])) == 4


def test_prompt_tokens_beyond_the_limit_are_refused() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_tokens=10)
    add(scheduler, "a", length=30)
    add(scheduler, "bc", length=5)
    assert "12 prompt tokens would wait, and at most 10 may (--max-num-queued-tokens)" in str(refused(scheduler, "d"))
    scheduler.abort_requests(["b"])
    refused(scheduler, "d", length=6)
    add(scheduler, "d", length=5)


def test_all_of_a_request_is_taken_or_nothing() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_queued_reqs=1)
    add(scheduler, "a")
    refused(scheduler, "b", "c", "d")  # one would run, one would wait, one is too many
    scheduler.add_request(make_request("b", [1]), make_request("c", [2]))
    refused(scheduler, "d")
    assert set(finish(scheduler)) == {"a", "b", "c"}


def test_an_idle_engine_takes_any_request() -> None:
    """It can be served at no better time."""
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_reqs=1, max_num_queued_tokens=1)
    scheduler.add_request(*(make_request(name, [1] * 9) for name in "abcd"))
    refused(scheduler, "e")
    assert set(finish(scheduler)) == set("abcd")
    scheduler.add_request(*(make_request(name, [1] * 9) for name in "abcd"))


def test_preempted_requests_are_not_refused_and_do_not_count() -> None:
    scheduler = crowded("fcfs", "abcd", max_num_queued_reqs=1)
    step(scheduler)
    assert len(scheduler.waiting) == 2  # thrown out by the others
    add(scheduler, "e")
    refused(scheduler, "f")
    assert set(finish(scheduler)) == set("abcde")


def test_refused_requests_leave_no_trace_in_the_count() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_queued_reqs=1)
    add(scheduler, "abc")
    for _ in range(5):
        refused(scheduler, "d", "e")
    scheduler.abort_requests(["c"])
    add(scheduler, "d")
    refused(scheduler, "e")


@pytest.mark.parametrize(("policy", "slack"), [("fcfs", 0), ("priority", 3)])
def test_the_bound_holds_whatever_happens(policy: str, slack: int) -> None:
    """After each step no more wait than may; under the priority policy, than may and those whose place was taken."""
    scheduler = make_scheduler(12, max_num_seqs=3, max_num_batched_tokens=12, max_num_queued_reqs=4, policy=policy)
    num_refused = 0
    for number in range(300):
        for part in range(number % 4):
            try:
                prompt = [number % 5] * (1 + number * 7 % 13)
                scheduler.add_request(
                    make_request(f"{number}-{part}", prompt, priority=number % 3 if policy == "priority" else 0)
                )
            except OverloadedError:
                num_refused += 1
        if number % 11 == 0 and scheduler.requests:
            scheduler.abort_requests([next(iter(scheduler.requests))])
        step(scheduler)
        first_turns = [request for request in scheduler.waiting if request.num_cached_tokens is None]
        assert len(first_turns) <= 4 + slack
    assert num_refused > 50
    finish(scheduler)
    assert scheduler.kv_cache_manager.usage == 0


def test_retry_after_follows_the_wait_of_the_last_that_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_reqs=1)
    add(scheduler, "a", max_tokens=1)
    step(scheduler)
    add(scheduler, "b", max_tokens=2)
    step(scheduler)
    add(scheduler, "c")
    assert refused(scheduler, "x").retry_after == 1
    now += 7.5
    assert refused(scheduler, "x").retry_after == 8  # nobody has entered for so long
    step(scheduler)
    step(scheduler)
    add(scheduler, "d")
    now += 1
    assert refused(scheduler, "x").retry_after == 8  # c has waited so long
    now += 1e6
    assert refused(scheduler, "x").retry_after == 60


@pytest.mark.parametrize("name", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_a_limit_of_nothing_is_a_mistake(name: str) -> None:
    with pytest.raises(ConfigError, match="must be a whole number between 1 and "):
        EngineArgs(model="m", **{name: 0})
    assert EngineArgs(model="m", **{name: 1}).stated["scheduler"] == {name: 1}
