"""Specification of AsyncLLM's last moments: what is still told, when the engine has died or processing has failed.

The engine is a script here, so that what comes before and after its death is the test's decision.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncLLM, RequestOutput, SamplingParams
from octavo.errors import EngineDeadError
from octavo.types import EngineCoreOutput, EngineCoreOutputs, EngineReady, FinishReason, RequestOutputKind


def seeded(**more: Any) -> SamplingParams:
    return SamplingParams(seed=4, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA, **more)


async def collect(stream: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in stream]


def token_ids(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.outputs[0].token_ids]


class ScriptedClient:
    """An engine that does as the test says; ``steps`` follow the first request, then it is dead."""

    def __init__(self, steps: list[EngineCoreOutputs]) -> None:
        self.ready = EngineReady(max_model_len=512, num_kv_blocks=8, block_size=16, load_seconds=0.0)
        self.dead_error: EngineDeadError | None = None
        self.exit_code_hint = 0
        self.steps = steps
        self.aborted: list[str] = []
        self._queue: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()

    async def wait_ready(self, progress: Any) -> EngineReady:
        return self.ready

    def add_requests(self, requests: Any) -> None:
        for step in self.steps:
            self._queue.put_nowait(step)
        self._queue.put_nowait(None)
        self.dead_error = EngineDeadError("out of memory")

    def abort_requests(self, request_ids: Any) -> None:
        assert self.dead_error is None
        self.aborted += request_ids

    async def get_outputs(self) -> EngineCoreOutputs:
        if (step := await self._queue.get()) is None:
            raise EngineDeadError(str(self.dead_error))
        return step

    def shutdown(self, timeout: float = 5.0) -> None:
        self.dead_error = self.dead_error or EngineDeadError("shut down")


@pytest.fixture
def scripted(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AsyncLLM]:
    def make(*steps: EngineCoreOutputs) -> AsyncLLM:
        monkeypatch.setattr(
            "octavo.engine.async_llm.make_async_client", lambda config, slot: ScriptedClient(list(steps))
        )
        return AsyncLLM(model=str(tiny_llama_dir), dtype="float32", disable_log_stats=True)

    return make


def test_outputs_that_came_before_a_death_still_reach_their_stream(scripted: Callable[..., AsyncLLM]) -> None:
    first = EngineCoreOutputs([EngineCoreOutput("a", [5])])
    last = EngineCoreOutputs([EngineCoreOutput("a", [6], finish_reason=FinishReason.LENGTH)])

    async def whole() -> None:
        llm = scripted(first, last)
        outputs = await collect(llm.generate("hello", seeded(), "a"))
        assert token_ids(outputs) == [5, 6]
        assert outputs[-1].finished
        assert str(await llm.wait_dead()) == "out of memory"
        llm.shutdown()

    async def cut_off() -> None:
        llm = scripted(first)
        stream = llm.generate("hello", seeded(), "a")
        assert token_ids([await anext(stream)]) == [5]
        with pytest.raises(EngineDeadError, match="out of memory"):
            await anext(stream)
        llm.shutdown()

    asyncio.run(asyncio.wait_for(whole(), 60))
    asyncio.run(asyncio.wait_for(cut_off(), 60))


def test_a_stop_string_found_after_the_death_does_not_cut_others_off(scripted: Callable[..., AsyncLLM]) -> None:
    async def both() -> None:
        llm = scripted()
        (token_id,) = llm.tokenizer.encode("e", add_special_tokens=False)
        stopping = EngineCoreOutputs([EngineCoreOutput("a", [token_id])])
        last = EngineCoreOutputs([EngineCoreOutput("b", [token_id], finish_reason=FinishReason.LENGTH)])
        await llm.ready()
        assert isinstance(llm._client, ScriptedClient)
        llm._client.steps = [stopping, last]
        streams = [
            collect(llm.generate_from(await llm.process_inputs("x", params, name)))
            for name, params in (("b", seeded()), ("a", seeded(stop=["e"])))
        ]
        llm._client.add_requests, add = (lambda requests: None), llm._client.add_requests
        tasks = [asyncio.create_task(stream) for stream in streams]
        await asyncio.sleep(0)
        add([])
        b, a = await asyncio.gather(*tasks)
        assert a[-1].outputs[0].stop_reason == "e"
        assert b[-1].finished
        llm.shutdown()

    asyncio.run(asyncio.wait_for(both(), 60))


def test_a_panic_in_output_processing_is_announced_as_a_death(
    scripted: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """As libraries in Rust raise it."""

    def process(*args: Any) -> Any:
        raise PanicException("index out of bounds")

    async def panic() -> None:
        llm = scripted(EngineCoreOutputs([]))
        await llm.ready()
        monkeypatch.setattr(llm._output_processor, "process", process)
        with pytest.raises(EngineDeadError, match="PanicException: index out of bounds"):
            await collect(llm.generate("hello", seeded(), "a"))
        assert "index out of bounds" in str(await llm.wait_dead())
        assert llm.exit_code_hint == 3
        llm.shutdown()

    asyncio.run(asyncio.wait_for(panic(), 60))
