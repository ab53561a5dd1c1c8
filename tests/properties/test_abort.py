"""A client that goes away frees its request within one step; the step trace shows it, and that the others go on."""

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncLLM
from octavo.engine.core import EngineCore
from octavo.types import RequestOutputKind
from tests.properties.harness import greedy, prompt

OUTPUTS_READ = 3
LEAVER_PROMPT, STAYER_PROMPT = prompt(70, 200), prompt(71, 20)
BLOCK = 16


async def leave_early(model: Path, trace: Path, overlap: bool) -> tuple[list[dict[str, Any]], int]:
    """Two streams, of which one is closed after a few outputs. Returns the step trace and a step by which the engine
    had been told: the utility call goes the way of the abort, behind it."""
    llm = AsyncLLM(
        model=str(model),
        dtype="float32",
        seed=0,
        kv_cache_memory_bytes=1 << 24,
        block_size=BLOCK,
        async_scheduling=overlap,
        step_trace=str(trace),
        disable_log_stats=True,
    )
    params = greedy(600, output_kind=RequestOutputKind.DELTA)

    async def stay() -> int:
        stream = llm.generate({"prompt_token_ids": STAYER_PROMPT}, params, "stayer")
        return sum([len(output.outputs[0].token_ids) async for output in stream])

    try:
        await llm.ready()
        staying = asyncio.create_task(stay())
        async with aclosing(llm.generate({"prompt_token_ids": LEAVER_PROMPT}, params, "leaver")) as stream:
            for _ in range(OUTPUTS_READ):
                await anext(stream)
        told = int((await llm.stats())["step"])
        assert await staying == 600
    finally:
        llm.shutdown()
    return [json.loads(line) for line in trace.read_text().splitlines()], told


def ids(step: dict[str, Any]) -> set[str]:
    return {request["id"] for request in step["requests"]}


def assert_gone(trace: list[dict[str, Any]], told: int) -> None:
    """From the step after ``told`` on the leaver is in no step and holds no block."""
    before = [step for step in trace if step["step"] <= told]
    after = [step for step in trace if step["step"] > told]
    assert sum("leaver" in ids(step) for step in before) >= OUTPUTS_READ
    assert len(after) > 10
    assert all(ids(step) == {"stayer"} for step in after)
    for step in after:
        held = step["requests"][0]["computed_before"] + step["requests"][0]["scheduled"]
        assert step["used_blocks"] == -(-held // BLOCK)
    assert [step["step"] for step in trace if "leaver" in step["finished"]] == [last_step_of_leaver(trace) + 1]


def last_step_of_leaver(trace: list[dict[str, Any]]) -> int:
    return max(step["step"] for step in trace if "leaver" in ids(step))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_step_is_without_the_request_of_a_client_that_went_away(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    monkeypatch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", "0")
    reached: list[int] = []
    abort = EngineCore.abort_requests

    def noting(core: EngineCore, request_ids: Any) -> Any:
        if "leaver" in (request_ids := list(request_ids)):
            reached.append(core.scheduler.stats().step)
        return abort(core, request_ids)

    monkeypatch.setattr(EngineCore, "abort_requests", noting)
    trace, _ = asyncio.run(leave_early(llama_dir, tmp_path / "trace.jsonl", overlap))
    # The steps up to this one had been scheduled when the abort came; with overlap the last of them was in flight.
    (told,) = reached
    assert last_step_of_leaver(trace) == told
    assert_gone(trace, told)
    assert max(step["in_flight"] for step in trace) == (2 if overlap else 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_in_a_process_of_its_own_hears_of_it_too(llama_dir: Path, tmp_path: Path, overlap: bool) -> None:
    assert_gone(*asyncio.run(leave_early(llama_dir, tmp_path / "trace.jsonl", overlap)))


def test_control_an_abort_that_gets_lost_is_noticed(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", "0")
    monkeypatch.setattr(EngineCore, "abort_requests", lambda core, request_ids: {})
    trace, told = asyncio.run(leave_early(llama_dir, tmp_path / "trace.jsonl", True))
    assert last_step_of_leaver(trace) > told
    with pytest.raises(AssertionError):
        assert_gone(trace, told)
