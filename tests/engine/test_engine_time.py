"""What a step costs the engine beside the model, counted in calls of Python functions: that depends on no machine.

A running request may cost a few calls, whatever its length.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest.mock import Mock

from octavo.core import Scheduler
from octavo.engine import EngineCore, EngineInputs, OutputProcessor
from octavo.types import EngineCoreRequest, RequestOutputKind, SamplingParams
from tests.engine.conftest import FakeExecutor, fake_config

# schedule: 3, update: 3, output: 3.
MOST_CALLS_A_REQUEST = 8


def num_calls(work: Callable[[], Any]) -> int:
    """Python functions that ``work`` calls, but those of the fake executor."""
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and "/tests/" not in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def calls_a_step(num_requests: int, num_tokens_before: int = 2) -> int:
    """Calls in a step that adds a token to each request, and opens no new block."""
    core = EngineCore(fake_config(max_num_seqs=64, max_num_batched_tokens=512), executor=FakeExecutor())
    processor = OutputProcessor(Mock())
    params = SamplingParams(
        temperature=0, max_tokens=400, seed=1, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    for index in range(num_requests):
        request = EngineCoreRequest(str(index), [3, 4, 5 + index], params, [], 0.0)
        processor.add_request(EngineInputs(str(index), None, params, [request]))
        core.add_request(request)

    def step() -> None:
        processor.process(core.next_outputs()[0])

    for _ in range(num_tokens_before):
        step()
    found = num_calls(step)
    core.shutdown()
    return found


def test_a_running_request_costs_a_few_calls_a_step() -> None:
    assert calls_a_step(40) - calls_a_step(8) <= 32 * MOST_CALLS_A_REQUEST


def test_a_step_costs_the_same_however_much_has_been_generated() -> None:
    assert calls_a_step(8, num_tokens_before=2) == calls_a_step(8, num_tokens_before=322)


def test_control_one_call_more_a_request_is_noticed(monkeypatch: Any) -> None:
    settle = Scheduler._settle

    def slower(scheduler: Scheduler, request: Any, *args: Any) -> Any:
        _ = request.num_tokens
        return settle(scheduler, request, *args)

    monkeypatch.setattr(Scheduler, "_settle", slower)
    assert calls_a_step(40) - calls_a_step(8) > 32 * MOST_CALLS_A_REQUEST
