"""POST /v1/chat/completions over the fake engine."""

from collections.abc import Callable
from typing import Any

import pytest


def test_messages_are_answered(server: Any) -> None:
    answer = server.chat().json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abcd", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len("u:hi")
    assert answer["usage"]["total_tokens"] == len("u:hi") + 4


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({"max_tokens": None}, 60),  # all that the model's 64 tokens leave
        ({"max_tokens": None, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
    ],
)
def test_the_most_tokens_of_an_answer(server: Any, fields: dict[str, Any], num_tokens: int) -> None:
    assert server.chat(**fields).json()["usage"]["completion_tokens"] == num_tokens


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(server: Any, events: Callable[..., list[Any]]) -> None:
    chunks = events(server.chat(stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in choices[1:-1]] == [{"content": letter} for letter in "abcd"]
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["length"]


def test_each_choice_of_a_stream_has_its_role_and_its_reason(server: Any, events: Callable[..., list[Any]]) -> None:
    choices = [chunk["choices"][0] for chunk in events(server.chat(n=3, temperature=1, stream=True))]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == "abcd"
        assert own[-1]["finish_reason"] == "length"


def test_every_chunk_of_a_stream_has_the_model_s_name_whatever_it_is(
    make_server: Callable[..., Any], events: Callable[..., list[Any]]
) -> None:
    name = '"choices":[] é\\'
    server = make_server(served_model_name=[name])
    options = {"model": name, "stream": True, "stream_options": {"include_usage": True}}
    for chunks in (events(server.chat(**options)), events(server.complete(**options))):
        assert [chunk["model"] for chunk in chunks] == [name] * len(chunks)
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


def test_usage_of_a_stream(server: Any, events: Callable[..., list[Any]]) -> None:
    *_, last = events(server.chat(stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"] == server.chat().json()["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(server.chat(stream=True, stream_options=options))]
    assert counts == [0, 1, 2, 3, 4, 4, 4]


def test_logprobs_list_the_chosen_token_and_the_most_likely_ones(server: Any) -> None:
    content = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b", "c", "d"]
    assert content[1]["logprob"] == -1.5
    assert content[1]["bytes"] == [ord("b")]
    assert content[1]["top_logprobs"] == [
        {"token": "<1>", "logprob": -0.1, "bytes": list(b"<1>")},
        {"token": "b", "logprob": -1.5, "bytes": list(b"b")},
    ]


def test_logprobs_without_top_logprobs(server: Any) -> None:
    content = server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 4


def test_logprobs_of_a_stream_are_those_of_the_answer(server: Any, events: Callable[..., list[Any]]) -> None:
    fields = {"logprobs": True, "top_logprobs": 1}
    whole = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    choices = [chunk["choices"][0] for chunk in events(server.chat(**fields, stream=True))]
    streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert streamed == whole


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": None, "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"}},
        {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}},
        {"top_logprobs": 0},
    ],
)
def test_fields_that_ask_for_nothing_are_served(server: Any, fields: dict[str, Any]) -> None:
    answer = server.chat(**fields)
    assert answer.status_code == 200, answer.text
    assert "x-octavo-ignored" not in answer.headers


def test_variables_that_the_template_never_reads_are_named_in_the_header(server: Any) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": True, "zzz": 1}}
    for stream in (False, True):
        ignored = server.chat(**fields, stream=stream).headers["x-octavo-ignored"]
        assert ignored == "chat_template_kwargs.enable_thinking, chat_template_kwargs.zzz"


def test_fields_of_messages_that_the_template_never_reads_are_named_in_the_header(server: Any) -> None:
    messages = [{"role": "user", "content": "a", "reasoning": None}, {"role": "assistant", "content": "b", "nam": "x"}]
    assert server.chat(messages=messages).headers["x-octavo-ignored"] == "messages[1].nam"
    del messages[1]["nam"]
    assert "x-octavo-ignored" not in server.chat(messages=messages).headers


def test_an_error_names_the_field_that_the_client_used(server: Any, error: Callable[..., Any]) -> None:
    error(server.chat(max_tokens=None, max_completion_tokens=0), 400, "max_completion_tokens")
    error(server.chat(logprobs=True, top_logprobs=21), 400, "top_logprobs")
