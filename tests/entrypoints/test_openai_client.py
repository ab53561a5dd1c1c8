"""The doors over the real engine and a real socket, through the `openai` package: what its users rely on."""

import contextlib
import http.client
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.entrypoints.live import LiveServer

pytestmark = pytest.mark.usefixtures("live_canary")
GREETING: Any = [{"role": "user", "content": "hello, how are you?"}]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "octavo")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=GREETING, max_completion_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens == 8
    assert usage.total_tokens == usage.prompt_tokens + 8


def rounded(value: Any) -> Any:
    """Logprobs to within 1e-4: with torch's kernels the last bits depend on what else is in the batch."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


@pytest.mark.parametrize(("temperature", "n"), [(0.0, 1), (1.0, 1), (1.0, 3)])
@pytest.mark.parametrize("with_stop", [False, True])
def test_a_streamed_chat_is_the_chat(client: openai.OpenAI, temperature: float, n: int, with_stop: bool) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": GREETING,
        "max_tokens": 24,
        "temperature": temperature,
        "n": n,
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 3,
        "stop": ["e", "no such text"] if with_stop else None,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(whole.choices) == n
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        assert choice.logprobs is not None
        entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content or []]
        whole_entries = choice.logprobs.content or []
        assert [entry.model_dump() for entry in entries] == rounded([entry.model_dump() for entry in whole_entries])
        visible = [entry for entry in entries if not entry.token.startswith("<|")]  # special tokens are no text
        text = bytes(byte for entry in visible for byte in entry.bytes or [])
        assert text.decode(errors="replace").startswith(choice.message.content or "")
        for entry in entries:
            assert len(entry.top_logprobs) == 3
            assert entry.top_logprobs == sorted(entry.top_logprobs, key=lambda top: -top.logprob)
            assert entry.logprob <= 0


@pytest.mark.parametrize("prompt", ["hello", ["hello", "the dog"], [5, 6, 7], [[5, 6, 7], [8, 9]]], ids=str)
def test_a_streamed_completion_is_the_completion(client: openai.OpenAI, prompt: Any) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 10, "n": 2, "seed": 3, "logprobs": 2}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True))
    num_prompts = 2 if isinstance(prompt[0], list) or len(prompt) == 2 else 1
    assert [choice.index for choice in whole.choices] == list(range(2 * num_prompts))
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [value for part in parts if part.logprobs for value in getattr(part.logprobs, name)]
            assert streamed == rounded(getattr(choice.logprobs, name))


def test_several_prompts_are_answered_as_if_each_had_come_alone(client: openai.OpenAI) -> None:
    prompts = ["hello", "the quick brown fox", "x"]
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 10, "temperature": 0}
    together = client.completions.create(prompt=prompts, **fields).choices
    for prompt, choice in zip(prompts, together, strict=True):
        assert client.completions.create(prompt=prompt, **fields).choices[0].text == choice.text


def test_clients_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(model="tiny", messages=GREETING, max_tokens=16, seed=seed)
        return answer.choices[0].message.content

    alone = [ask(seed) for seed in range(8)]
    assert len(set(alone)) > 4
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone


def test_a_stop_string_ends_the_text(client: openai.OpenAI, golden: str) -> None:
    stop = golden[4:6]
    fields: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    choice = client.completions.create(**fields, stop=stop, extra_body={"ignore_eos": True}).choices[0]
    assert choice.text == golden[: golden.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == stop


def test_cached_prompt_tokens_are_told(client: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        prompt: Any = list(range(10, 60))
        usage = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        ).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert [cached("a"), cached("a"), cached("b")] == [0, 48, 0]


def test_mistakes_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=GREETING, temperature=3)
    assert caught.value.param == "temperature"
    assert "between 0 and 2" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=GREETING)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
        client.completions.create(model="tiny", prompt="hello " * 1000)
    with pytest.raises(openai.BadRequestError, match="role"):
        client.chat.completions.create(model="tiny", messages=[{"content": "hi"}])  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(
            model="tiny", messages=GREETING, tools=[{"type": "function", "function": {"name": "f"}}]
        )


def test_a_client_that_hangs_up_frees_its_request(make_tiny_llama: Callable[..., Path]) -> None:
    """C1: mid-stream, and while waiting for an answer in one piece; all of it would take far longer than the bounds."""
    length = 3000
    live = LiveServer(make_tiny_llama(max_position_embeddings=4096))
    try:
        body = {"prompt": "hello", "max_tokens": length, "ignore_eos": True}
        with httpx.stream("POST", live.url + "/v1/completions", json=body | {"stream": True}) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(live.url + "/v1/completions", json=body | {"n": 4}, timeout=httpx.Timeout(5, read=0.1))
        deadline = time.monotonic() + 1
        while live.metric("request_success_total", finished_reason="abort") < 5:
            assert time.monotonic() < deadline, "not aborted within a second"
        assert live.metric("generation_tokens_total") < 5 * length
    finally:
        live.stop()


def test_metrics_agree_with_usage(live: LiveServer, client: openai.OpenAI) -> None:
    names = (
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_generation_tokens_sum",
        "request_params_n_count",
    )
    before = {name: live.metric(name) for name in names}
    ended = live.metric("request_success_total", finished_reason="length")
    usages = [
        client.completions.create(model="tiny", prompt=["a b c", "d"], n=2, max_tokens=9).usage,
        client.chat.completions.create(model="tiny", messages=GREETING, max_tokens=5).usage,
        client.completions.create(model="tiny", prompt="hello", max_tokens=20, stop="e").usage,
    ]
    grown = {name: live.metric(name) - before[name] for name in names}
    num_prompt_tokens = sum(usage.prompt_tokens for usage in usages if usage)
    num_completion_tokens = sum(usage.completion_tokens for usage in usages if usage)
    assert grown["prompt_tokens_total"] == num_prompt_tokens
    assert grown["generation_tokens_total"] == num_completion_tokens
    assert grown["request_generation_tokens_sum"] == num_completion_tokens
    assert grown["request_params_n_count"] == 4
    assert live.metric("request_success_total", finished_reason="length") > ended


def test_the_series_that_dashboards_know(live: LiveServer) -> None:
    text = httpx.get(live.url + "/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "iteration_tokens_total_bucket",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
        "request_success_total",
    ):
        assert re.search(rf'^vllm:{name}\{{.*engine="0".*model_name="tiny"', text, re.MULTILINE), name
    assert live.metric("time_to_first_token_seconds_count") > 0
    assert live.metric("inter_token_latency_seconds_sum") > 0
    assert live.metric("e2e_request_latency_seconds_sum") < 600  # the clocks of the two processes agree


def raw(live: LiveServer, *pieces: bytes) -> bytes:
    """What the server answers to these bytes before it closes the connection."""
    host, port = live.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        with contextlib.suppress(ConnectionError):  # closed while we were still sending
            for piece in pieces:
                connection.sendall(piece)
        with contextlib.suppress(ConnectionError):
            while received := connection.recv(65536):
                answer += received
    return answer


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_is_cut_short(live: LiveServer, chunked: bool) -> None:
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 10000000000"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + length + b"\r\n\r\n"
    piece = b"8000\r\n" + b" " * 0x8000 + b"\r\n" if chunked else b" " * 0x8000
    answer = raw(live, head, *[piece] * 8)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"--max-body-bytes" in answer


def test_the_refusal_of_a_huge_body_reaches_clients_that_send_first_and_read_later(live: LiveServer) -> None:
    for _ in range(5):
        connection = http.client.HTTPConnection(live.url.removeprefix("http://"), timeout=10)
        connection.request("POST", "/v1/completions", b" " * 5_000_000, {"Content-Type": "application/json"})
        assert connection.getresponse().status == 413
        connection.close()


def test_what_is_no_http_is_refused(live: LiveServer) -> None:
    assert raw(live, b"GARBAGE\r\n\r\n").startswith(b"HTTP/1.1 400")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    bad_chunk = head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
    assert raw(live, bad_chunk).startswith(b"HTTP/1.1 400") or raw(live, bad_chunk) == b""


def test_a_connection_is_of_use_after_an_error(live: LiveServer) -> None:
    with httpx.Client(base_url=live.url) as connection:
        assert connection.post("/v1/completions", json={"prompt": ""}).status_code == 400
        assert connection.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200
