"""Requests and queues: who goes first, and which moves a request may make."""

import pytest

from octavo.core import FCFSRequestQueue, PriorityRequestQueue, Request, RequestQueue, RequestStatus
from octavo.types import FinishReason
from tests.core.harness import EOS, make_request


def waiting(name: str, order: int, priority: int = 0, arrival_time: float = 0.0) -> Request:
    return Request(make_request(name, [1], priority=priority, arrival_time=arrival_time), 64, 4, b"key", order)


def popped(queue: RequestQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_fcfs_keeps_the_order_of_arrival_and_puts_the_preempted_first() -> None:
    queue = FCFSRequestQueue()
    a, b, c = (waiting(name, order) for order, name in enumerate("abc"))
    queue.add(b)
    queue.add(c)
    queue.put_back(a)
    assert queue.peek() is a
    queue.remove(b)
    assert popped(queue) == ["a", "c"]


def test_priority_orders_by_priority_then_arrival_then_order() -> None:
    queue = PriorityRequestQueue()
    requests = [
        waiting("late", 0, priority=0, arrival_time=2.0),
        waiting("low", 1, priority=5, arrival_time=0.0),
        waiting("early", 2, priority=0, arrival_time=1.0),
        waiting("tie", 3, priority=0, arrival_time=1.0),
        waiting("high", 4, priority=-1, arrival_time=9.0),
    ]
    for request in requests[:-1]:
        queue.add(request)
    queue.put_back(requests[-1])
    assert queue.peek().request_id == "high"
    queue.remove(requests[0])
    assert popped(queue) == ["high", "early", "tie", "low"]


@pytest.mark.parametrize("queue", [FCFSRequestQueue(), PriorityRequestQueue()])
def test_what_is_not_waiting_cannot_be_removed(queue: RequestQueue) -> None:
    queue.add(waiting("a", 0))
    with pytest.raises(KeyError):
        queue.remove(waiting("b", 1))
    assert len(queue) == 1


def test_a_request_makes_only_the_moves_it_may() -> None:
    request = waiting("a", 0)
    with pytest.raises(RuntimeError, match="from WAITING to PREEMPTED"):
        request.preempt()
    request.enter(1, 0, 0.0)
    with pytest.raises(RuntimeError, match="from RUNNING to RUNNING"):
        request.enter(2, 0, 0.0)
    request.preempt()
    request.enter(3, 0, 0.0)
    request.finish(FinishReason.STOP)
    assert request.status is RequestStatus.FINISHED
    with pytest.raises(RuntimeError, match="from FINISHED to FINISHED"):
        request.finish(FinishReason.ABORT)


@pytest.mark.parametrize(
    ("fields", "sampled", "taken", "reason", "stop_reason"),
    [
        ({"eos_token_ids": [EOS]}, [1, EOS, 2], [1, EOS], FinishReason.STOP, None),
        ({}, [1, EOS, 2], [1, EOS, 2], None, None),
        ({"stop_token_ids": [3]}, [1, 3, 2], [1, 3], FinishReason.STOP, 3),
        ({"stop_token_ids": [EOS], "eos_token_ids": [EOS]}, [EOS], [EOS], FinishReason.STOP, None),
        ({"stop_token_ids": [3], "min_tokens": 3}, [3, 3, 3, 3], [3, 3, 3], FinishReason.STOP, 3),
        ({"max_tokens": 2}, [1, 1, 1], [1, 1], FinishReason.LENGTH, None),
        ({"max_tokens": 2, "stop_token_ids": [3]}, [1, 3, 1], [1, 3], FinishReason.STOP, 3),
        ({"max_tokens": 100}, [1] * 10, [1] * 7, FinishReason.LENGTH, None),
    ],
    ids=[
        "eos",
        "no eos",
        "stop id",
        "eos before stop id",
        "min_tokens",
        "length",
        "stop before length",
        "model length",
    ],
)
def test_what_ends_a_request(
    fields: dict[str, object],
    sampled: list[int],
    taken: list[int],
    reason: FinishReason | None,
    stop_reason: int | None,
) -> None:
    request = Request(make_request("a", [1, 2, 3], **{"max_tokens": 10, **fields}), 10, 4, b"key", 0)
    assert request.append_tokens(sampled) == (len(taken), reason)
    assert request.token_ids == [1, 2, 3, *taken]
    assert request.stop_reason == stop_reason
