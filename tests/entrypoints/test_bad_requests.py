"""Every mistake of a client is a small 4xx in OpenAI's shape that names the field, and leaves the server as it was."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

VOCAB_SIZE = 300
MAX_MODEL_LEN = 64
HUGE = 2**63
Error = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def nothing_is_started(server: Any, canary: None) -> Iterator[None]:
    """A refused request never reaches the engine. (Tests of accepted ones clear ``started``.)"""
    yield
    assert server.engine.started == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [b"", b'{"model":', b"[]", b'"x"', b"null", b"42", b"true", b'{"a": 1} {"b": 2}', b"\xff\xfe", b"{'model': 1}"],
)
def test_a_body_that_is_no_json_object_is_refused(server: Any, error: Error, path: str, body: bytes) -> None:
    assert error(server.post(path, body), 400)["type"] == "Bad Request"


def test_an_empty_body_is_said_to_be_empty(server: Any, error: Error) -> None:
    for body in (b"", b" \n"):
        response = server.post("/v1/completions", body)
        assert "is empty" in error(response, 400)["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"hi"}],"n":' + b"1" * 5000 + b"}",
        b'{"messages":' + b"[" * 9_000 + b"]" * 9_000 + b"}",
        b'{"a":' * 2_000 + b"1" + b"}" * 2_000,
        b'{"messages":[{"role":"user","content":' + b"[" * 9_000,
    ],
    ids=["half a surrogate pair", "5000 digits", "deep arrays", "deep objects", "deep and cut off"],
)
def test_hostile_json_is_refused(server: Any, error: Error, body: bytes) -> None:
    error(server.post("/v1/chat/completions", body), 400)


def test_json_nested_a_hundred_thousand_deep_is_refused(make_server: Callable[..., Any], error: Error) -> None:
    server = make_server(max_body_bytes=1 << 20)
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        nested = opening * 100_000 + b"1" + closing * 100_000
        error(server.post("/v1/completions", b'{"prompt":"hi","user":' + nested + b"}"), 400)


@pytest.mark.parametrize("content_type", ["text/plain", "", "multipart/form-data", "application/x-www-form-urlencoded"])
def test_another_content_type_is_refused(server: Any, error: Error, content_type: str) -> None:
    response = server.post("/v1/completions", b'{"prompt":"hi"}', headers={"content-type": content_type})
    assert "Content-Type" in error(response, 400)["message"]


def test_json_with_a_charset_is_taken(server: Any) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.post("/v1/completions", b'{"prompt":"hi"}', headers=headers).status_code == 200
    server.engine.started.clear()


def test_an_unknown_model_is_not_found(server: Any, error: Error) -> None:
    for response in (server.complete(model="nope"), server.chat(model="nope"), server.get("/v1/models/nope")):
        assert error(response, 404, "model")["type"] == "NotFoundError"
    assert len(error(server.complete(model="x" * 10_000), 404, "model")["message"]) < 300


def test_the_model_may_be_left_out(server: Any) -> None:
    response = server.post("/v1/completions", {"prompt": "hi"})
    assert response.json()["model"] == "m"
    server.engine.started.clear()


COMMON_MISTAKES = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", "0.5"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 2**31),
    ("n", 0),
    ("n", -1),
    ("n", 16385),
    ("n", HUGE),
    ("n", 2),  # at temperature 0
    ("n", "2"),
    ("n", True),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", MAX_MODEL_LEN + 1),
    ("max_tokens", HUGE),
    ("max_tokens", 2**64),
    ("max_tokens", 10**40),
    ("max_tokens", "4"),
    ("max_tokens", 4.5),
    ("max_tokens", True),
    ("min_tokens", 9),  # max_tokens is 4
    ("min_tokens", -1),
    ("seed", HUGE),
    ("seed", -HUGE - 1),
    ("seed", 0.5),
    ("priority", HUGE),
    ("priority", 1),  # the policy is fcfs
    ("stop", ["1", "2", "3", "4", "5"]),
    ("stop", [""]),
    ("stop", ""),
    ("stop", [1]),
    ("stop", 1),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [HUGE]),
    ("stop_token_ids", ["x"]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", 7),
    ("ignore_eos", "yes"),
    ("ignore_eos", 1),
    ("stream", "true"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),  # without stream
    ("stream_options", "usage"),
    ("cache_salt", ""),
    ("cache_salt", "s" * 129),
    ("cache_salt", "a/b"),
    ("cache_salt", 5),
    ("request_id", "two words"),
    ("request_id", ""),
    ("model", 5),
    ("presence_penalty", 2.1),
    ("presence_penalty", "1"),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", False),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {str(HUGE): 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"5": 1, "05": 1}),
    ("logit_bias", [5]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [VOCAB_SIZE]),
    ("allowed_token_ids", [HUGE]),
    ("allowed_token_ids", ["x"]),
    ("bad_words", [""]),
    ("bad_words", ["w"] * 129),
    ("bad_words", [1]),
    ("bad_words", "word"),
    ("logprob_token_ids", [VOCAB_SIZE]),
    ("logprob_token_ids", [-1]),
    ("logprob_token_ids", [HUGE]),
    ("logprob_token_ids", ["x"]),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", -1),  # the whole vocabulary is more than --max-logprobs
    ("prompt_logprobs", "1"),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", HUGE),
    ("truncate_prompt_tokens", "5"),
    ("include_stop_str_in_output", 1),
    ("skip_special_tokens", "no"),
    ("spaces_between_special_tokens", 0),
    ("detokenize", "no"),
    ("vllm_xargs", [1]),
    ("vllm_xargs", "x"),
    ("echo", "yes"),
    ("return_token_ids", 1),
    ("return_tokens_as_token_ids", 1),
    ("guided_regex", "("),
    ("guided_choice", []),
    ("structured_outputs", {"choice": []}),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema"}),
    ("use_beam_search", True),
]


@pytest.mark.parametrize("door", ["complete", "chat"])
@pytest.mark.parametrize(("field", "value"), COMMON_MISTAKES, ids=str)
def test_a_wrong_value_names_its_field(server: Any, error: Error, door: str, field: str, value: Any) -> None:
    error(getattr(server, door)(**{field: value}), 400, field)


@pytest.mark.parametrize("door", ["complete", "chat"])
@pytest.mark.parametrize(("field", "value"), [("temperature", 3), ("n", 0), ("stop", ""), ("guided_regex", "(")])
def test_a_stream_is_refused_before_it_begins(server: Any, error: Error, door: str, field: str, value: Any) -> None:
    error(getattr(server, door)(stream=True, **{field: value}), 400, field)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_numbers_that_are_not_finite_are_refused(server: Any, error: Error, field: str, literal: str) -> None:
    error(server.post("/v1/completions", f'{{"prompt":"hi","{field}":{literal}}}'.encode()), 400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [""]),
        ("prompt", ["hi", ""]),
        ("prompt", [[]]),
        ("prompt", [[5], []]),
        ("prompt", [-1]),
        ("prompt", [VOCAB_SIZE]),
        ("prompt", [HUGE]),
        ("prompt", [2**64]),
        ("prompt", [1.5]),
        ("prompt", [5, "x"]),
        ("prompt", [5, True]),
        ("prompt", [True]),
        ("prompt", [[5], "x"]),
        ("prompt", ["x", [5]]),
        ("prompt", [[[5]]]),
        ("prompt", [None]),
        ("prompt", {"text": "hi"}),
        ("prompt", 5),
        ("prompt", ["x"] * 1025),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", "5"),
        ("logprobs", True),
        ("suffix", "end"),  # the model has no tokens for it
        ("suffix", 5),
        ("best_of", 1_000_000),
        ("best_of", 0),
        ("best_of", "1"),
        ("add_special_tokens", "no"),
        ("prompt_embeds", "x"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_completions(server: Any, error: Error, field: str, value: Any) -> None:
    error(server.complete(**{field: value}), 400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "hi"),
        ("messages", None),
        ("messages", ["hi"]),
        ("messages", {"role": "wizard", "content": 5}),
        ("messages", [{"role": "wizard", "content": "hi"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("top_logprobs", 5),  # without logprobs
        ("top_logprobs", "5"),
        ("logprobs", 5),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", MAX_MODEL_LEN + 1),
        ("tools", []),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", 7),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"chat_template": "x"}),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", "x"),
        ("chat_template_kwargs", {"continue_final_message": True}),
        ("chat_template_kwargs", {"documents": []}),
        ("documents", "x"),
        ("documents", ["x"]),
        ("continue_final_message", "yes"),
        ("add_generation_prompt", 1),
        ("add_special_tokens", True),
        ("functions", [{"name": "f"}]),
        ("modalities", ["audio"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_chats(server: Any, error: Error, field: str, value: Any) -> None:
    error(server.chat(**{field: value}), 400, field)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}},
        {"type": "input_audio", "input_audio": {"data": "x"}},
        {"type": "text"},
        {"text": "x"},
        "x",
        None,
    ],
    ids=lambda part: str(part)[:40],
)
@pytest.mark.parametrize("door", ["chat", "tokenize"])
def test_parts_that_are_no_text_are_refused(server: Any, error: Error, door: str, part: Any) -> None:
    """A19, for models of text."""
    message = {"role": "user", "content": [{"type": "text", "text": "look"}, part]}
    error(getattr(server, door)(messages=[message]), 400, "messages")


@pytest.mark.parametrize("door", ["chat", "tokenize"])
def test_a_hundred_thousand_conversations_at_once_are_refused(
    make_server: Callable[..., Any], error: Error, door: str
) -> None:
    server = make_server(max_body_bytes=1 << 23)
    error(getattr(server, door)(messages=[[{"role": "user", "content": "x"}]] * 100_000), 400, "messages")
    assert server.engine.rendered == []


@pytest.mark.parametrize(
    "text", ["e" + "\u0301" * 500_000, "\x00" * 1_000_000, "🙂" * 300_000], ids=["marks", "NUL", "emoji"]
)
def test_a_megabyte_of_unusual_text_is_answered_in_short(
    make_server: Callable[..., Any], error: Error, text: str
) -> None:
    server = make_server(max_body_bytes=1 << 25)
    error(server.complete(prompt=text), 400, "input_tokens")
    error(server.chat(messages=[{"role": "user", "content": text}]), 400, "input_tokens")
    assert server.tokenize(prompt=text).json()["count"] == len(text.encode())


def test_top_logprobs_beyond_the_limit(server: Any, error: Error) -> None:
    error(server.chat(logprobs=True, top_logprobs=21), 400, "top_logprobs")
    error(server.chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs")


def test_a_message_calls_the_field_as_the_client_does(server: Any, error: Error) -> None:
    found = error(server.chat(logprobs=True, top_logprobs=21), 400, "top_logprobs")
    assert found["message"].startswith("top_logprobs must be at most 20 (--max-logprobs)")
    found = error(server.chat(max_tokens=None, max_completion_tokens=0), 400, "max_completion_tokens")
    assert found["message"].startswith("max_completion_tokens must be between")
    found = error(server.complete(vllm_xargs={"a": 1}), 400, "vllm_xargs")
    assert found["message"].startswith("vllm_xargs are for custom logits processors")
    found = error(server.complete(logprobs=21), 400, "logprobs")  # control: the same name
    assert found["message"].startswith("logprobs must be at most 20 (--max-logprobs)")


def test_missing_fields_are_named(server: Any, error: Error) -> None:
    assert error(server.post("/v1/chat/completions", {"model": "m"}), 400, "messages")["type"] == "Bad Request"
    error(server.post("/v1/completions", {"model": "m"}), 400, "prompt")


@pytest.mark.parametrize(
    ("field", "neutral"),
    [
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0),
        ("repetition_penalty", 1.0),
        ("min_p", 0),
        ("logit_bias", {}),
        ("logit_bias", None),
        ("allowed_token_ids", None),
        ("bad_words", []),
        ("guided_regex", None),
        ("structured_outputs", None),
        ("truncate_prompt_tokens", None),
        ("skip_special_tokens", True),
        ("vllm_xargs", {}),
        ("use_beam_search", False),
        ("response_format", {"type": "text"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("door", ["complete", "chat"])
def test_a_value_that_asks_for_nothing_is_served(server: Any, door: str, field: str, neutral: Any) -> None:
    response = getattr(server, door)(**{field: neutral})
    assert response.status_code == 200
    assert "x-octavo-ignored" not in response.headers
    server.engine.started.clear()


def test_unknown_fields_are_served_and_named(server: Any) -> None:
    fields = {"user": "u", "metadata": {"a": 1}, "böse\r\nx: y": 1}
    for ask in (server.complete, server.chat):
        response = ask(**fields, stream=True, stream_options={"include_usage": True, "verbose": True})
        assert response.status_code == 200
        named = response.headers["x-octavo-ignored"]
        assert named == "user, metadata, b%C3%B6se%0D%0Ax%3A%20y, stream_options.verbose"
    many = {f"{'é' * 80}{index}": 1 for index in range(60)}
    assert len(server.complete(**many).headers["x-octavo-ignored"]) < 4096
    server.engine.started.clear()


def test_prompt_and_output_must_fit(server: Any, error: Error) -> None:
    prompt = [5] * 40
    response = server.complete(prompt=prompt, max_tokens=MAX_MODEL_LEN - 40)
    assert response.json()["usage"]["completion_tokens"] == MAX_MODEL_LEN - 40
    assert response.json()["choices"][0]["finish_reason"] == "length"
    server.engine.started.clear()
    message = error(server.complete(prompt=prompt, max_tokens=MAX_MODEL_LEN - 39), 400, "input_tokens")["message"]
    assert "40" in message
    assert str(MAX_MODEL_LEN) in message
    error(server.complete(prompt=[5] * MAX_MODEL_LEN, max_tokens=1), 400, "input_tokens")
    error(server.complete(prompt="x" * 15_000), 400, "input_tokens")
    error(server.chat(messages=[{"role": "user", "content": "x" * 200}], max_tokens=None), 400, "input_tokens")
    error(server.chat(min_tokens=10**9, max_tokens=None), 400, "min_tokens")


def test_one_wrong_prompt_refuses_them_all_and_says_which(server: Any, error: Error) -> None:
    message = error(server.complete(prompt=[[5], [5, 6], [VOCAB_SIZE]]), 400, "prompt")["message"]
    assert "prompt 2" in message


def test_many_choices_are_refused_at_once(server: Any, error: Error) -> None:
    begin = time.perf_counter()
    error(server.complete(n=16385, temperature=1), 400, "n")
    error(server.complete(prompt=["x"] * 1000, n=17, temperature=1), 400, "n")
    error(server.complete(prompt=["x"] * 1025), 400, "prompt")
    assert time.perf_counter() - begin < 1.0


@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_words"])
def test_the_parameters_of_many_prompts_are_bounded_together(make_server: Any, error: Error, field: str) -> None:
    """A list that is sent once would be held once for each prompt: a million ids for a thousand prompts, 8 GB."""
    server = make_server(max_body_bytes=1 << 24)
    value = [7] * 500_000 if field == "allowed_token_ids" else ["x" * 1024] * 128
    num_bytes = 500_000 if field == "allowed_token_ids" else 128 * 1024 * 2
    most = (1 << 26) // num_bytes
    message = error(server.complete(**{"prompt": ["x"] * (most + 1), field: value}), 400, "prompt")["message"]
    assert f"there are {most + 1} choices" in message
    assert server.engine.started == []
    assert server.complete(**{"prompt": ["x"] * (most // 8), field: value}).status_code == 200


def test_the_tokens_of_many_prompts_are_bounded_in_all_choices_together(make_server: Any, error: Error) -> None:
    server = make_server(max_body_bytes=1 << 22)
    server.engine.lengthen(1 << 16)
    fields = {"max_tokens": 1, "temperature": 1}
    most = (1 << 22) // (16 * 40_000)
    answer = server.complete(**fields, prompt=[[5] * 40_000] * (most + 1), n=16)
    assert "tokens in all 16 choices" in error(answer, 400, "n")["message"]
    assert server.engine.started == []
    assert server.complete(**fields, prompt=[[5] * 40_000] * most, n=16).status_code == 200
    assert server.complete(**fields, prompt=[[5] * 40_000] * (most + 1), n=1).status_code == 200


def test_a_body_beyond_the_limit_is_refused_early(server: Any, error: Error) -> None:
    body = json.dumps({"prompt": "x" * 30_000}).encode()
    response = server.post("/v1/completions", body)
    error(response, 413)
    assert response.headers["connection"] == "close"
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 1_000_000
            yield b" " * 1_000_000

    headers = {"content-type": "application/json"}
    error(server.request("POST", "/v1/completions", content=endless(), headers=headers), 413)
    assert sent < 300_000_000  # some of what arrives after the answer is thrown away


def test_unknown_paths_and_methods(server: Any, error: Error) -> None:
    assert error(server.get("/"), 404)["type"] == "NotFoundError"
    error(server.post("/v1/completions/", {}), 404)
    error(server.get("/v1/completions/../../etc/passwd"), 404)
    response = server.get("/v1/chat/completions")
    error(response, 405)
    assert response.headers["allow"] == "POST"
    error(server.post("/health", {}), 405)


def test_texts_that_are_unusual_are_served(server: Any) -> None:
    for text in ("\x00", "e" + "\u0301" * 25, "👩‍👩‍👧‍👦", "\u202e", "<|im_start|>"):
        assert server.complete(prompt=text).status_code == 200
        assert server.chat(messages=[{"role": "user", "content": text}]).status_code == 200
    server.engine.started.clear()
