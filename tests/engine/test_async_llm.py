"""Specification of AsyncLLM, on a tiny random Llama in an engine process of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from octavo import AsyncLLM, RequestOutput, SamplingParams
from octavo.config import EngineArgs
from octavo.engine.throughput_log import ThroughputLog
from octavo.errors import CheckpointError, EngineDeadError, OverloadedError, RequestError, RequestFailedError
from octavo.types import RequestOutputKind, SchedulerStats

_T = TypeVar("_T")
Run = Callable[[Awaitable[_T]], _T]

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "seed": 0,
    "num_gpu_blocks_override": 256,
    "max_num_seqs": 8,
    "disable_log_stats": True,
}
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, seed=1, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def run() -> Iterator[Run[Any]]:
    """Runs an awaitable on the module's event loop."""
    loop = asyncio.new_event_loop()

    async def bounded(awaitable: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(awaitable, 120)

    yield lambda awaitable: loop.run_until_complete(bounded(awaitable))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path, run: Run[Any]) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(model=str(tiny_llama_dir), **OPTIONS)
    llm.start()
    run(llm.ready())
    yield llm

    async def shutdown() -> None:
        llm.shutdown()
        await asyncio.sleep(0)

    run(shutdown())


LONG = 400  # tokens: what is under way for a while


def seeded(kind: RequestOutputKind = RequestOutputKind.DELTA, **more: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 4, "max_tokens": 40, "ignore_eos": True, "output_kind": kind} | more))


async def collect(stream: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in stream]


def joined(outputs: list[RequestOutput], index: int = 0) -> tuple[str, list[int]]:
    choices = [choice for output in outputs for choice in output.outputs if choice.index == index]
    return "".join(choice.text for choice in choices), [i for choice in choices for i in choice.token_ids]


# ---- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stop": ["e", "\n"]}, {"logprobs": 2}])
def test_the_three_output_kinds_tell_the_same(llm: AsyncLLM, run: Run[Any], more: dict[str, Any]) -> None:
    delta, cumulative, final = (
        run(collect(llm.generate("hello fox", seeded(kind, **more), "a")))
        for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
    )
    assert len(final) == 1
    assert final[0].finished
    for choice, last in zip(final[0].outputs, cumulative[-1].outputs, strict=True):
        assert joined(delta, choice.index) == (choice.text, choice.token_ids) == (last.text, last.token_ids)
        assert choice == last
    assert [output.finished for output in delta] == [False] * (len(delta) - 1) + [True]


def test_requests_together_equal_requests_alone(llm: AsyncLLM, run: Run[Any]) -> None:
    prompts = ["hello", "Once upon a time", "x" * 50, {"prompt_token_ids": [9] * 100}]

    def stream(index: int) -> AsyncGenerator[RequestOutput, None]:
        return llm.generate(prompts[index], seeded(seed=index), f"r{index}")

    async def together() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(stream(index)) for index in range(len(prompts))))

    alone = [run(collect(stream(index))) for index in range(len(prompts))]
    assert [joined(outputs) for outputs in run(together())] == [joined(outputs) for outputs in alone]


def test_a_slow_reader_gets_what_has_gathered_as_one(llm: AsyncLLM, run: Run[Any]) -> None:
    async def read_slowly() -> list[RequestOutput]:
        stream = llm.generate("hello", seeded(), "slow")
        outputs = [await anext(stream)]
        # The other has as many tokens to make and starts later: when it ends, this one has ended too.
        await collect(llm.generate("hello", seeded(), "other"))
        return outputs + await collect(stream)

    outputs = run(read_slowly())
    assert len(outputs) == 2
    assert joined(outputs) == joined(run(collect(llm.generate("hello", seeded(), "plain"))))


def test_text_is_encoded_off_the_loop(llm: AsyncLLM, run: Run[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    threads = []

    def encode(*args: Any) -> list[int]:
        threads.append(threading.current_thread())
        return original(*args)

    original = llm.tokenizer.encode
    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    (whole,) = run(collect(llm.generate(text, seeded(RequestOutputKind.FINAL_ONLY), "a")))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
    assert whole.prompt_token_ids == llm.tokenizer.encode(text)
    ids = {"prompt_token_ids": whole.prompt_token_ids}
    (again,) = run(collect(llm.generate(ids, seeded(RequestOutputKind.FINAL_ONLY), "a")))
    assert again.outputs == whole.outputs


def test_a_chat_is_rendered_off_the_loop(llm: AsyncLLM, run: Run[Any]) -> None:
    rendered = run(llm.render([{"role": "user", "content": "hello"}]))
    assert rendered.text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_a_closed_stream_frees_its_request_in_the_engine(llm: AsyncLLM, run: Run[Any]) -> None:
    async def leave() -> tuple[float, float]:
        stream = llm.generate("hello", ENDLESS, "a")
        await anext(stream)
        during = await llm.stats()
        await stream.aclose()
        after = await llm.stats()  # travels behind the abort
        return during["num_running"], after["num_running"] + after["num_waiting"] + after["kv_cache_usage"]

    assert run(leave()) == (1, 0)


def test_a_cancelled_reader_frees_its_request(llm: AsyncLLM, run: Run[Any]) -> None:
    async def leave() -> float:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate("hello", ENDLESS, "a"):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return (await llm.stats())["num_running"]

    assert run(leave()) == 0


def test_an_abort_by_id_ends_the_stream_with_that_reason(llm: AsyncLLM, run: Run[Any]) -> None:
    async def stop_it() -> list[RequestOutput]:
        stream = llm.generate("hello", ENDLESS, "a")
        first = await anext(stream)
        await llm.abort("a")
        await llm.abort("unknown")
        return [first, *await collect(stream)]

    outputs = run(stop_it())
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert run(llm.stats())["num_running"] == 0


def test_a_stop_string_frees_the_request_in_the_engine(llm: AsyncLLM, run: Run[Any]) -> None:
    text, _ = joined(run(collect(llm.generate("hello", seeded(), "a"))))
    params = seeded(max_tokens=None, stop=[text[10:13]])
    outputs = run(collect(llm.generate("hello", params, "a")))
    assert joined(outputs)[0] == text[: text.index(text[10:13])]
    assert outputs[-1].outputs[0].stop_reason == text[10:13]
    assert run(llm.stats())["num_running"] == 0


def test_an_id_may_be_used_again_at_once(llm: AsyncLLM, run: Run[Any]) -> None:
    expected = joined(run(collect(llm.generate("hello", seeded(), "b"))))

    async def again() -> list[RequestOutput]:
        stream = llm.generate("Once upon", ENDLESS, "a")
        await anext(stream)
        await stream.aclose()
        return await collect(llm.generate("hello", seeded(), "a"))

    for _ in range(3):
        assert joined(run(again())) == expected


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_an_id_under_way_is_refused_and_its_owner_goes_on(llm: AsyncLLM, run: Run[Any]) -> None:
    async def both() -> list[RequestOutput]:
        stream = llm.generate("hello", seeded(max_tokens=LONG), "a")
        first = await anext(stream)
        with pytest.raises(RequestError) as caught:
            await collect(llm.generate("hello", seeded(), "a"))
        assert caught.value.param == "request_id"
        return [first, *await collect(stream)]

    assert len(joined(run(both()))[1]) == LONG


def test_a_bad_request_is_refused_before_anything_starts(llm: AsyncLLM, run: Run[Any]) -> None:
    for prompt, options, param in (
        ("", {}, "prompt"),
        ("x" * 100_000, {}, "input_tokens"),
        ("a", {"cache_salt": "a/b"}, "cache_salt"),
        ("a", {"priority": 2**63}, "priority"),
    ):
        with pytest.raises(RequestError) as caught:
            run(collect(llm.generate(prompt, seeded(), "a", **options)))
        assert caught.value.param == param
        with pytest.raises(RequestError):
            run(llm.process_inputs(prompt, seeded(), "a", **options))


def test_requests_during_loading_are_refused_for_now(tiny_llama_dir: Path, run: Run[Any]) -> None:
    async def too_early() -> None:
        llm = AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_llama_dir), **OPTIONS))
        llm.start()
        try:
            ready = asyncio.create_task(llm.ready())
            with pytest.raises(OverloadedError, match="still loading"):
                await collect(llm.generate("hello", seeded(), "a"))
            assert not llm.is_ready
        finally:
            llm.shutdown()
        for late in (ready, collect(llm.generate("hello", seeded(), "a")), llm.render([])):
            with pytest.raises(EngineDeadError, match="shut down"):
                await late

    run(too_early())


def test_after_a_shutdown_nothing_is_started(tiny_llama_dir: Path, run: Run[Any]) -> None:
    async def too_late() -> None:
        llm = AsyncLLM(model=str(tiny_llama_dir), **OPTIONS)
        llm.shutdown()
        llm.shutdown()
        for late in (llm.ready(), collect(llm.generate("hello", seeded(), "a")), llm.stats()):
            with pytest.raises(EngineDeadError, match="shut down"):
                await late
        with pytest.raises(EngineDeadError, match="shut down"):
            llm.start()

    run(too_late())


def test_the_engine_may_be_a_thread_of_this_process(
    llm: AsyncLLM, tiny_llama_dir: Path, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", "0")

    async def whole_life() -> list[RequestOutput]:
        inside = AsyncLLM(model=str(tiny_llama_dir), **OPTIONS)
        try:
            outputs = await collect(inside.generate("hello", seeded(), "a"))
            assert inside._client.engine_pid is None  # type: ignore[union-attr]
            stream = inside.generate("hello", ENDLESS, "b")
            await anext(stream)
        finally:
            inside.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(stream)
        return outputs

    assert joined(run(whole_life())) == joined(run(collect(llm.generate("hello", seeded(), "a"))))


SCRIPT = """
import asyncio, sys
from octavo import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM(model=sys.argv[1], num_gpu_blocks_override=64)
    async for output in llm.generate("hello", SamplingParams(max_tokens=5, ignore_eos=True), "a"):
        pass
    print(len(output.outputs[0].token_ids), llm._client.engine_pid, flush=True)
    return llm

llm = asyncio.run(main())
if sys.argv[2] == "shutdown":
    llm.shutdown()
"""


@pytest.mark.parametrize("end", ["shutdown", "exit"])
def test_a_script_may_outlive_its_event_loop_and_leaves_no_engine(tiny_llama_dir: Path, end: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tiny_llama_dir), end]
    environment = os.environ | {"OCTAVO_LOG_LEVEL": "WARNING"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    count, pid = done.stdout.split()
    assert count == "5"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


# ---- deaths ---------------------------------------------------------------------------------------------------------


def test_without_start_the_first_requests_wait_and_a_killed_engine_ends_every_stream(
    tiny_llama_dir: Path, run: Run[Any]
) -> None:
    async def live_and_die() -> None:
        llm = AsyncLLM(model=str(tiny_llama_dir), **OPTIONS)
        impatient = asyncio.create_task(collect(llm.generate("hello", ENDLESS, "impatient")))
        await asyncio.sleep(0.01)
        impatient.cancel()  # which is no reason for the others not to get their model
        streams = [llm.generate("hello", ENDLESS, str(index)) for index in range(3)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        assert llm.is_ready
        assert llm.progress == ("ready", 1.0)
        begun = time.monotonic()
        os.kill(llm._client.engine_pid, signal.SIGKILL)  # type: ignore[union-attr]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await collect(stream)
        assert "SIGKILL" in str(await llm.wait_dead())
        assert time.monotonic() - begun < 5
        assert not llm.is_ready
        assert llm.exit_code_hint == 3
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await collect(llm.generate("hello", seeded(), "late"))
        llm.shutdown()

    run(live_and_die())


def test_a_model_that_cannot_be_loaded_is_told_as_the_cause(
    make_tiny_llama: Callable[..., Path], run: Run[Any]
) -> None:
    folder, other = make_tiny_llama(), make_tiny_llama()

    async def load_without_tokenizer() -> None:
        llm = AsyncLLM(model=str(other), **OPTIONS)
        (other / "tokenizer.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            await llm.ready()
        assert llm.exit_code_hint == 1
        assert "tokenizer.json" in str(await llm.wait_dead())

    async def load() -> None:
        llm = AsyncLLM(model=str(folder), **OPTIONS)
        (folder / "model.safetensors").write_bytes(b"\0" * 100)
        with pytest.raises(EngineDeadError, match=r"model\.safetensors"):
            await llm.ready()
        assert llm.exit_code_hint == 1
        assert not llm.is_ready
        assert "model.safetensors" in str(await llm.wait_dead())

    run(load())
    run(load_without_tokenizer())


def test_output_that_cannot_be_processed_fails_its_stream_and_the_engine_goes_on(
    llm: AsyncLLM, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode_token(token_id: int) -> str:
        raise ValueError("no such token")

    async def fail() -> list[RequestOutput]:
        plain = llm.generate("hello", seeded(), "plain")
        first = await anext(plain)
        with monkeypatch.context() as patch:
            patch.setattr(llm.tokenizer, "decode_token", decode_token)
            with pytest.raises(RequestFailedError, match="no such token"):
                await collect(llm.generate("hello", seeded(logprobs=1, max_tokens=None), "failing"))
        outputs = [first, *await collect(plain)]
        assert (await llm.stats())["num_running"] == 0
        return outputs

    assert len(joined(run(fail()))[1]) == 40
    assert llm.is_ready


def test_a_stray_stop_iteration_in_a_thread_is_an_error_and_no_endless_wait(
    llm: AsyncLLM, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(*args: Any, **options: Any) -> Any:
        return next(iter(()))

    monkeypatch.setattr(llm.renderer, "render", render)
    with pytest.raises(RuntimeError, match="StopIteration"):
        run(asyncio.wait_for(llm.render([]), 10))


# ---- the throughput log ---------------------------------------------------------------------------------------------


def test_throughput_is_logged_while_there_are_steps(run: Run[Any], capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        log = ThroughputLog(interval=0.05)
        first = SchedulerStats(
            num_running=2,
            prefix_cache_queries_total=100,
            prefix_cache_hits_total=50,
            prompt_tokens_total=10,
            generation_tokens_total=5,
        )
        log.on_step(SchedulerStats(prompt_tokens_total=10, generation_tokens_total=1))
        log.on_step(first)
        await asyncio.sleep(0.2)  # one line, and none for the time when nothing happens
        second = SchedulerStats(
            num_waiting=3,
            prefix_cache_queries_total=200,
            prefix_cache_hits_total=75,
            prompt_tokens_total=10,
            generation_tokens_total=6,
        )
        log.on_step(second)
        await asyncio.sleep(0.1)
        log.on_step(second)
        log.close()
        await asyncio.sleep(0.1)

    run(work())
    lines = [line for line in capfd.readouterr().err.splitlines() if "tokens/s" in line]
    assert len(lines) == 2
    assert "200.0 prompt and 100.0 generated tokens/s; 2 running, 0 waiting" in lines[0]
    assert "50.0 % of prompt tokens from the prefix cache" in lines[0]
    assert "0.0 prompt and 20.0 generated tokens/s; 0 running, 3 waiting" in lines[1]
    assert "25.0 % of prompt tokens" in lines[1]


# ---- a full queue ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(tiny_llama_dir: Path, run: Run[Any]) -> Iterator[AsyncLLM]:
    """One request runs, two may wait."""
    llm = AsyncLLM(model=str(tiny_llama_dir), **(OPTIONS | {"max_num_seqs": 1, "max_num_queued_reqs": 2}))
    run(llm.ready())
    yield llm

    async def shutdown() -> None:
        llm.shutdown()
        await asyncio.sleep(0)

    run(shutdown())


@pytest.mark.parametrize("counts", [[1, 1, 1], [3], [1, 2]], ids=["requests", "choices", "both"])
def test_what_would_wait_beyond_the_limit_is_refused_whole(narrow: AsyncLLM, run: Run[Any], counts: list[int]) -> None:
    async def main() -> None:
        labels = {"model_name": narrow.config.model.served_model_name[0], "reason": "max_num_queued_reqs"}
        before = narrow.metrics.registry.get_sample_value("vllm:admission_rejections_total", labels)
        running = narrow.generate({"prompt_token_ids": [7, 8]}, ENDLESS, "running")
        await anext(running)
        waiting = [
            await narrow.process_inputs({"prompt_token_ids": [9]}, seeded(n=count, temperature=1), f"w{index}")
            for index, count in enumerate(counts)
        ]
        with pytest.raises(OverloadedError, match="--max-num-queued-reqs") as refusal:
            await collect(narrow.generate_from(*waiting))
        assert refusal.value.retry_after >= 1
        counted = narrow.metrics.registry.get_sample_value("vllm:admission_rejections_total", labels)
        assert counted == before + len(counts)
        assert (await narrow.stats())["num_waiting"] == 0
        two = [await narrow.process_inputs({"prompt_token_ids": [9]}, seeded(), name) for name in ("a", "b")]
        both = asyncio.create_task(collect(narrow.generate_from(*two)))
        while (await narrow.stats())["num_waiting"] < 2:
            pass
        await running.aclose()
        outputs = await both
        assert {output.request_id for output in outputs if output.finished} == {"a", "b"}
        assert joined([output for output in outputs if output.request_id == "a"])[1]

    run(main())


def test_several_requests_come_as_they_are_there_and_end_together(llm: AsyncLLM, run: Run[Any]) -> None:
    async def main() -> None:
        alone = joined(await collect(llm.generate({"prompt_token_ids": [5, 6]}, seeded(), "alone")))
        three = [
            await llm.process_inputs({"prompt_token_ids": [5, 6]}, seeded(max_tokens=count), f"t{count}")
            for count in (40, 1, 20)
        ]
        outputs = await collect(llm.generate_from(*three))
        assert [output.request_id for output in outputs if output.finished] == ["t1", "t20", "t40"]
        assert joined([output for output in outputs if output.request_id == "t40"]) == alone
        with pytest.raises(RequestError, match="still under way"):
            await collect(llm.generate_from(three[0], three[0]))
        endless = [await llm.process_inputs({"prompt_token_ids": [5]}, ENDLESS, name) for name in ("x", "y")]
        stream = llm.generate_from(*endless)
        await anext(stream)
        await stream.aclose()
        while (await llm.stats())["num_running"]:
            pass

    run(main())


def test_a_prompt_that_nobody_waits_for_any_more_is_not_encoded(
    llm: AsyncLLM, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose turn has not come; the next one need not wait for them."""
    begun: list[str] = []
    go_on = threading.Event()
    assert llm._input_processor is not None
    process = llm._input_processor.process

    def slow_process(request_id: str, *args: Any, **more: Any) -> Any:
        begun.append(request_id)
        go_on.wait(20)
        return process(request_id, *args, **more)

    monkeypatch.setattr(llm._input_processor, "process", slow_process)

    async def main() -> None:
        names = [f"gone{number}" for number in range(50)]
        tasks = [asyncio.create_task(collect(llm.generate("hello", seeded(), name))) for name in names]
        while not begun:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        before = len(begun)
        assert before < 10
        last = asyncio.create_task(collect(llm.generate("hello", seeded(), "last")))
        await asyncio.sleep(0)
        go_on.set()
        assert (await last)[-1].finished
        assert len(begun) <= before + 5
        assert begun[-1] == "last"
        assert (await llm.stats())["num_running"] == 0

    run(main())
