"""Specification of AsyncLLM: every parameter through streams, of any output kind, one request among others."""

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncLLM, RequestOutput, SamplingParams
from octavo.errors import ConfigError, RequestError, RequestFailedError
from octavo.types import RequestOutputKind

Run = Callable[[Awaitable[Any]], Any]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "seed": 0,
    "num_gpu_blocks_override": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 32,
    "max_logprobs": -1,
    "disable_log_stats": True,
}
PROCESSOR = """
from octavo.sample import LogitsProcessor

class Shy(LogitsProcessor):
    @classmethod
    def validate_params(cls, params):
        if params.extra_args.get("fails_after", 0) < 0:
            raise ValueError("fails_after must not be negative")

    def new_request(self, params, prompt_token_ids):
        limit = params.extra_args.get("fails_after")

        def process(output_token_ids, logits):
            if len(output_token_ids) == limit:
                raise RuntimeError("that is enough")
            return logits

        return None if limit is None else process
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs an awaitable on the module's event loop."""
    loop = asyncio.new_event_loop()
    yield lambda awaitable: loop.run_until_complete(asyncio.wait_for(awaitable, 120))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    name = "processors_of_test_async_sampling"
    folder = tmp_path_factory.mktemp("processors")
    (folder / f"{name}.py").write_text(PROCESSOR)
    recommended = {"temperature": 0.0, "max_new_tokens": 6}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        llm = AsyncLLM(
            model=str(tiny_llama_dir),
            logits_processors=[f"{name}:Shy"],
            override_generation_config=recommended,
            **OPTIONS,
        )
        llm.start()
        run(llm.ready())
    yield llm

    async def shutdown() -> None:
        llm.shutdown()
        await asyncio.sleep(0)

    run(shutdown())
    sys.modules.pop(name, None)


async def collect(stream: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in stream]


def params(kind: RequestOutputKind = RequestOutputKind.DELTA, **more: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 4, "max_tokens": 24, "ignore_eos": True, "output_kind": kind} | more))


def joined(outputs: list[RequestOutput]) -> list[dict[str, Any]]:
    """All that the outputs say of each choice, put together from deltas, but for logprobs."""
    found = []
    for index in range(max(choice.index for output in outputs for choice in output.outputs) + 1):
        choices = [choice for output in outputs for choice in output.outputs if choice.index == index]
        tables = [table for choice in choices for table in choice.logprobs or []]
        found.append(
            {
                "text": "".join(choice.text for choice in choices),
                "token_ids": [token_id for choice in choices for token_id in choice.token_ids],
                "end": (choices[-1].finish_reason, choices[-1].stop_reason),
                "tokens": [{token_id: entry.decoded_token for token_id, entry in table.items()} for table in tables],
            }
        )
    return found


def numbers(outputs: list[RequestOutput]) -> list[float]:
    """All logprobs. To be compared to within 1e-4: with torch's kernels the last bits depend on the batch."""
    choices = sorted((choice for output in outputs for choice in output.outputs), key=lambda choice: choice.index)
    tables = [table for choice in choices for table in choice.logprobs or []]
    tables += [table for table in outputs[0].prompt_logprobs or [] if table is not None]
    sums = {choice.index: choice.cumulative_logprob or 0.0 for choice in choices}
    return [*sums.values(), *(table[token_id].logprob for table in tables for token_id in sorted(table))]


PROMPT = "The quick brown fox jumps over the lazy dog, and the dog looks on. " * 2
COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "n": 2},
    "masks": {"allowed_token_ids": list(range(40, 90)), "bad_words": ["a", "dog"], "logit_bias": {44: 2.0}},
    "min_p": {"min_p": 0.2, "temperature": 1.7, "top_k": 50},
    "included stop string": {"stop": ["e", "\n", "than"], "include_stop_str_in_output": True, "n": 3},
    "included stop token": {"stop_token_ids": list(range(30, 120)), "include_stop_str_in_output": True},
    "special tokens": {"allowed_token_ids": [0, 1, 2, 70, 71], "skip_special_tokens": False, "max_tokens": 12},
    "special tokens and the end": {
        "allowed_token_ids": [0, 1, 2, 70, 71],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "ignore_eos": False,
        "min_tokens": 3,
        "include_stop_str_in_output": True,
    },
    "no text": {"detokenize": False, "logprobs": 2},
    "named tokens": {"logprob_token_ids": [300, 5], "stop": ["o"]},
    "whole vocabulary": {"logprobs": -1, "max_tokens": 4},
    "prompt logprobs": {"prompt_logprobs": 3, "logprobs": 1, "n": 2},
    "truncated": {"truncate_prompt_tokens": 9, "prompt_logprobs": 0, "stop": ["zz"]},
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_streams_of_every_kind_tell_the_same(llm: AsyncLLM, run: Run, name: str) -> None:
    stated = COMBINATIONS[name]
    delta, cumulative, final = (
        run(collect(llm.generate(PROMPT, params(kind, **stated), "a")))
        for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
    )
    assert len(final) == 1
    assert joined(delta) == joined(final) == joined(cumulative[-1:])
    for outputs in (delta, cumulative[-1:]):
        assert numbers(outputs) == pytest.approx(numbers(final), abs=1e-4)
    assert all(output.prompt_logprobs is None for output in delta[1:])
    assert (final[0].prompt_logprobs is not None) == ("prompt_logprobs" in stated)
    truncated = {output.num_truncated_prompt_tokens for output in [*delta, *cumulative, *final]}
    assert truncated == {len(llm.tokenizer.encode(PROMPT)) - 9 if "truncate_prompt_tokens" in stated else 0}
    assert len(final[0].prompt_logprobs or [None] * len(final[0].prompt_token_ids)) == len(final[0].prompt_token_ids)


def test_each_request_has_its_own_parameters_in_a_crowd(llm: AsyncLLM, run: Run) -> None:
    def stream(name: str) -> AsyncGenerator[RequestOutput, None]:
        return llm.generate(PROMPT, params(**COMBINATIONS[name]), name)

    async def together() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(stream(name)) for name in COMBINATIONS))

    for name, outputs in zip(COMBINATIONS, run(together()), strict=True):
        alone = joined(run(collect(stream(name))))
        crowded = joined(outputs)
        assert [choice["token_ids"] for choice in crowded] == [choice["token_ids"] for choice in alone], name
        assert [choice["text"] for choice in crowded] == [choice["text"] for choice in alone], name


def test_the_models_defaults_are_what_an_unstated_request_gets(llm: AsyncLLM, run: Run) -> None:
    defaults = llm.default_sampling_params
    assert (defaults.temperature, defaults.max_tokens) == (0.0, 6)
    unstated = run(collect(llm.generate("hello", None, "a")))[-1]
    stated = run(collect(llm.generate("hello", defaults, "b")))[-1]
    assert unstated.outputs == stated.outputs


def test_a_refusal_names_its_parameter_and_nothing_is_started(llm: AsyncLLM, run: Run) -> None:
    for stated in ({"allowed_token_ids": [10**6]}, {"bad_words": [" \ud800"]}, {"extra_args": {"fails_after": -1}}):
        with pytest.raises(RequestError) as caught:
            run(collect(llm.generate("hello", params(**stated), "a")))
        assert [caught.value.param] == list(stated)
    assert run(llm.stats())["num_running"] == 0


def test_a_custom_processor_that_fails_ends_its_own_stream(llm: AsyncLLM, run: Run) -> None:
    async def work() -> tuple[list[RequestOutput], int]:
        other = asyncio.create_task(collect(llm.generate("hello", params(), "other")))
        failing = llm.generate("hello", params(extra_args={"fails_after": 3}), "failing")
        seen = [len((await anext(failing)).outputs[0].token_ids)]
        with pytest.raises(RequestFailedError, match="Shy failed: RuntimeError: that is enough"):
            seen += [len(output.outputs[0].token_ids) async for output in failing]
        return await other, seen[0]

    outputs, seen = run(work())
    assert 1 <= seen <= 3
    assert joined(outputs) == joined(run(collect(llm.generate("hello", params(), "alone"))))


def test_words_are_encoded_off_the_loop_even_beside_ids(
    llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    original = llm.tokenizer.encode

    def encode(*args: Any, **options: Any) -> list[int]:
        threads.append(threading.current_thread())
        return original(*args, **options)

    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    run(collect(llm.generate({"prompt_token_ids": [5, 6]}, params(bad_words=["dog"]), "a")))
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_a_custom_processor_that_cannot_be_loaded_is_told_as_the_cause(tiny_llama_dir: Path, run: Run) -> None:
    async def load() -> None:
        llm = AsyncLLM(model=str(tiny_llama_dir), logits_processors=["json:JSONDecoder"], **OPTIONS)
        with pytest.raises(ConfigError, match="--logits-processors json:JSONDecoder"):
            await llm.ready()
        assert llm.exit_code_hint == 1
        assert "json:JSONDecoder" in str(await llm.wait_dead())

    run(load())
