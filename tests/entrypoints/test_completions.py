"""POST /v1/completions over the fake engine: shapes of prompts and answers, streams, logprobs, token counts."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest


def test_a_prompt_is_completed(server: Any) -> None:
    answer = server.complete().json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "m"
    assert answer["choices"] == [
        {"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_max_tokens_is_sixteen_when_nothing_is_said_or_null_is(server: Any) -> None:
    body = {"model": "m", "prompt": "hi"}
    assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 16
    assert server.complete(max_tokens=None).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_only_a_stated_max_tokens_is_refused_for_want_of_room(server: Any, error: Any, stream: bool) -> None:
    prompt = [[5] * 60, [5] * 40]  # of 64
    body = {"model": "m", "prompt": prompt, "stream": stream}
    if stream:
        assert server.post("/v1/completions", body).status_code == 200
    else:
        assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 4 + 16
    error(server.post("/v1/completions", body | {"max_tokens": 16}), 400, "input_tokens")
    error(server.post("/v1/completions", body | {"min_tokens": 17}), 400, "min_tokens")
    error(server.post("/v1/completions", body | {"min_tokens": 5}), 400, "min_tokens")


@pytest.mark.parametrize(
    ("prompt", "num_prompts", "num_tokens"),
    [
        ("hello", 1, 5),
        (["hello", "you"], 2, 8),
        ([5, 6, 7], 1, 3),
        ([[5, 6, 7], [8]], 2, 4),
    ],
)
def test_prompts_come_in_four_shapes(server: Any, prompt: Any, num_prompts: int, num_tokens: int) -> None:
    answer = server.complete(prompt=prompt).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(num_prompts))
    assert answer["usage"]["prompt_tokens"] == num_tokens
    assert answer["usage"]["completion_tokens"] == 4 * num_prompts


def test_choices_are_numbered_prompt_by_prompt_and_prompts_count_once(server: Any) -> None:
    answer = server.complete(prompt=["ab", "cd", "ef"], n=2, temperature=1.0).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 24


def test_choices_are_in_order_whichever_is_done_first(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = server.engine.generate_one
    done: list[str] = []

    async def first_prompt_last(inputs: Any) -> AsyncGenerator[Any, None]:
        while inputs.prompt == "first" and len(done) < 2:
            await asyncio.sleep(0)
        async for output in generate(inputs):
            yield output
        done.append(inputs.prompt)

    monkeypatch.setattr(server.engine, "generate_one", first_prompt_last)
    choices = server.complete(prompt=["first", "second", "third"], n=2, temperature=1).json()["choices"]
    assert done[-1] == "first"
    assert [choice["index"] for choice in choices] == list(range(6))


def test_a_stream_concatenates_to_the_answer(server: Any, events: Callable[..., list[Any]]) -> None:
    chunks = events(server.complete(stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcd"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_a_stream_of_many_prompts_numbers_its_choices(server: Any, events: Callable[..., list[Any]]) -> None:
    chunks = events(server.complete(prompt=["ab", "cd"], n=2, temperature=1.0, stream=True))
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(4), "abcd")


def test_include_usage_adds_a_last_chunk_without_choices(server: Any, events: Callable[..., list[Any]]) -> None:
    *chunks, last = events(server.complete(stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert not any("usage" in chunk for chunk in chunks)


def test_continuous_usage_is_in_every_chunk(server: Any, events: Callable[..., list[Any]]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server.complete(stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}


def test_logprobs_are_parallel_lists(server: Any) -> None:
    logprobs = server.complete(logprobs=3).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "d"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-0.5, -1.5, -0.5, -1.5]
    assert logprobs["top_logprobs"][1] == {"<1>": -0.1, "b": -1.5, "<3>": pytest.approx(-0.3)}
    assert list(logprobs["top_logprobs"][1]) == ["<1>", "b", "<3>"]


def test_logprobs_zero_lists_the_chosen_token_alone(server: Any) -> None:
    logprobs = server.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -0.5}, {"b": -1.5}, {"c": -0.5}, {"d": -1.5}]


def test_logprobs_of_a_stream_are_those_of_the_answer(server: Any, events: Callable[..., list[Any]]) -> None:
    whole = server.complete(logprobs=2).json()["choices"][0]["logprobs"]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in events(server.complete(logprobs=2, stream=True))]
    for name, values in whole.items():
        assert [value for chunk in chunks for value in chunk[name]] == values


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan")])
def test_a_logprob_that_json_cannot_hold_is_bounded(server: Any, logprob: float) -> None:
    server.engine.logprob_of_b = logprob
    logprobs = server.complete(logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5, -9999.0, -0.5, -9999.0]


def test_sampling_parameters_reach_the_engine(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    process = server.engine.process_inputs

    async def spy(prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
        seen.append((params, options))
        return await process(prompt, params, request_id, **options)

    monkeypatch.setattr(server.engine, "process_inputs", spy)
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "seed": 11,
        "stop": ["x", "y"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 2,
    }
    assert server.complete(**fields, cache_salt="salt").status_code == 200
    params, options = seen[0]
    assert {name: getattr(params, name) for name in fields} == fields
    assert options["cache_salt"] == "salt"


def test_priority_reaches_an_engine_that_goes_by_it(make_server: Any) -> None:
    server = make_server(scheduling_policy="priority")
    assert server.complete(priority=-3).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "min_p": 0},
        {"echo": False, "suffix": None, "best_of": 1, "logit_bias": {}, "response_format": {"type": "text"}},
        {"stop": None, "seed": None, "n": None, "top_p": None, "stream": None, "stream_options": None},
    ],
)
def test_fields_that_ask_for_nothing_are_served(server: Any, fields: dict[str, Any]) -> None:
    answer = server.complete(**fields)
    assert answer.status_code == 200, answer.text
    assert "x-octavo-ignored" not in answer.headers
