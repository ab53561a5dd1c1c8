"""The `openai` package: whole answers and streams, what it retries, and its own exceptions for all that goes wrong."""

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from conversations import REASONED, SHORT
from octavo_server import KEY, LIMITED_KEY, MODEL, OctavoServer, wait_until


@pytest.fixture(scope="module")
def client(server: OctavoServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object) == (MODEL, "model")
    assert card.to_dict()["max_model_len"] == 2048
    assert client.models.retrieve(MODEL) == card


def test_a_chat_and_its_stream_are_the_same(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": SHORT, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert whole.usage
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole._request_id
    assert whole.id.endswith(whole._request_id)


def test_the_package_can_put_a_stream_together(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": SHORT, "temperature": 0, "logprobs": True}
    with client.chat.completions.stream(**fields, stop="e", max_tokens=64) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    assert {"content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert choice.finish_reason == "stop"
    assert choice.message.content
    assert "e" not in choice.message.content
    assert choice.logprobs
    assert len(choice.logprobs.content or []) >= 1
    with (
        client.chat.completions.stream(**fields, max_tokens=2) as stream,
        pytest.raises(openai.LengthFinishReasonError),
    ):
        stream.get_final_completion()


def test_usage_in_every_chunk_counts_up_to_the_last(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt="Once upon a time",
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
            extra_body={"ignore_eos": True, "stop": None},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_reasoning_is_apart_under_both_its_names(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": REASONED, "max_tokens": 60, "temperature": 0}
    message = client.chat.completions.create(**fields).choices[0].message.to_dict()
    assert message["reasoning"]
    assert message["reasoning"] == message["reasoning_content"]
    assert "think>" not in f"{message['reasoning']}{message['content']}"
    deltas = [chunk.choices[0].delta.to_dict() for chunk in client.chat.completions.create(**fields, stream=True)]
    for name in ("reasoning", "reasoning_content", "content"):
        assert "".join(str(delta.get(name) or "") for delta in deltas) == message[name]


def test_token_ids_are_prompts_and_cached_ones_are_told(client: openai.OpenAI) -> None:
    text = "The quick brown fox jumps over the lazy dog, again and again. " * 3
    told = client.completions.create(model=MODEL, prompt=text, max_tokens=1, extra_body={"return_token_ids": True})
    token_ids = told.choices[0].to_dict()["prompt_token_ids"]
    usage = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, extra_body={"cache_salt": "ids"}).usage
        for prompt in (token_ids, [token_ids], text)  # type: ignore[list-item]
    ]
    cached = [entry.prompt_tokens_details.cached_tokens for entry in usage if entry and entry.prompt_tokens_details]
    whole_blocks = (len(token_ids) - 1) // 16 * 16
    assert whole_blocks > 0
    assert cached == [0, whole_blocks, whole_blocks]


def test_mistakes_are_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=SHORT, temperature=3)
    assert (caught.value.param, caught.value.type) == ("temperature", "BadRequestError")
    assert "temperature must be" in caught.value.message
    with pytest.raises(openai.NotFoundError) as absent:
        client.chat.completions.create(model="gpt-4o", messages=SHORT)
    assert (absent.value.param, absent.value.type) == ("model", "NotFoundError")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048"):
        client.completions.create(model=MODEL, prompt="a " * 3000, stream=True)
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model=MODEL, prompt="a " * 17_000_000)
    assert large.value.status_code == 413


def test_a_client_that_leaves_or_gives_up_stops_its_work(client: openai.OpenAI, server: OctavoServer) -> None:
    aborted = server.metric("request_success_total", finished_reason="abort")
    fields: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**fields, stream=True) as stream:
        next(stream)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**fields, timeout=0.3)
    assert wait_until(lambda: server.metric("request_success_total", finished_reason="abort") == aborted + 2, 2)


def test_many_at_once_each_get_their_own(server: OctavoServer) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=120) as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=SHORT, max_tokens=12, seed=seed % 8, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*[one(seed) for seed in range(32)])

    texts = asyncio.run(ask())
    assert [texts[seed % 8] for seed in range(32)] == texts
    assert len(set(texts)) > 4


def test_a_wrong_key_and_none(server: OctavoServer) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=3).models.list()
    assert server.http.get("/v1/models", headers={"authorization": ""}).status_code == 401
    assert server.http.get("/health", headers={"authorization": ""}).status_code == 200


def test_a_key_at_its_limit_is_told_and_comes_again(server: OctavoServer) -> None:
    """429 with Retry-After."""
    fields: dict[str, Any] = {"model": MODEL, "prompt": "x", "extra_body": {"ignore_eos": True}}
    hasty = openai.OpenAI(base_url=f"{server.url}/v1", api_key=LIMITED_KEY, max_retries=0)
    with hasty.completions.create(**fields, max_tokens=1000, stream=True) as stream:
        next(stream)
        with pytest.raises(openai.RateLimitError) as caught:
            hasty.completions.create(**fields, max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) > 0
        patient = hasty.with_options(max_retries=10)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(patient.completions.create, **fields, max_tokens=1)
            time.sleep(0.2)
            assert not answer.done()
            stream.close()
            assert answer.result(60).choices[0].finish_reason == "length"


def test_it_waits_for_a_server_that_has_too_much_to_do() -> None:
    server = OctavoServer("--max-model-len", "2048", "--max-num-seqs", "1", "--max-num-queued-reqs", "1").wait_ready()
    try:
        hasty = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        fields: dict[str, Any] = {"model": MODEL, "prompt": "x", "extra_body": {"ignore_eos": True}}
        with hasty.completions.create(**fields, max_tokens=2000, stream=True) as running, ThreadPoolExecutor(2) as pool:
            next(running)
            queued = pool.submit(hasty.completions.create, **fields, max_tokens=1)
            assert wait_until(lambda: server.metric("num_requests_waiting") == 1, 10)
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError) as caught:
                    hasty.completions.create(**fields, max_tokens=1, stream=stream)
                assert caught.value.status_code == 503
                assert int(caught.value.response.headers["retry-after"]) > 0
            patient = pool.submit(hasty.with_options(max_retries=10).completions.create, **fields, max_tokens=1)
            time.sleep(0.2)
            running.close()
            for answer in (queued, patient):
                assert answer.result(60).choices[0].finish_reason == "length"
        server.check_idle()
    finally:
        server.close()


def test_it_waits_for_a_server_that_is_loading() -> None:
    """503 with Retry-After: the package tries again by itself."""
    server = OctavoServer("--max-model-len", "256", "--shutdown-timeout", "0")
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0).models.list()
        assert caught.value.status_code == 503
        assert "loading" in caught.value.message
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=8)
        answer = client.completions.create(model=MODEL, prompt="x", max_tokens=2, extra_body={"ignore_eos": True})
        assert answer.usage
        assert answer.usage.completion_tokens == 2
    finally:
        server.close()


@pytest.mark.parametrize(("how", "exit_code"), [("drained", 0), ("killed", 3)])
def test_a_stream_that_the_server_cannot_finish_raises(how: str, exit_code: int) -> None:
    server = OctavoServer("--shutdown-timeout", "0").wait_ready()
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        stream = client.completions.create(
            model=MODEL, prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        if how == "drained":
            server.process.send_signal(signal.SIGTERM)
        else:
            os.kill(engine_of(server), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert time.monotonic() - began < 5
        assert "shutting down" in caught.value.message or "died" in caught.value.message
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["code"] == 503
        assert server.process.wait(10) == exit_code
    finally:
        server.close()


def engine_of(server: OctavoServer) -> int:
    """The process id of its engine."""
    for folder in os.scandir("/proc"):
        try:
            with open(f"/proc/{folder.name}/stat") as stat, open(f"/proc/{folder.name}/cmdline") as words:
                if int(stat.read().rpartition(")")[2].split()[1]) == server.process.pid and "core_proc" in words.read():
                    return int(folder.name)
        except (OSError, IndexError):
            continue
    raise AssertionError(json.dumps([server.process.pid, server.log()]))
