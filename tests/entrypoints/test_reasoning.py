"""Chats of models that think first: reasoning and content come apart, streamed or not, only where there is a format."""

from collections.abc import Callable
from typing import Any

import pytest

Events = Callable[..., list[Any]]

ANSWER = "<think>\nwhy not?\n</think>\n\nYes."
THINKS = "{{ messages }}<think>"


def collected(chunks: list[Any], index: int = 0) -> dict[str, str]:
    """Fields of the deltas of one choice, concatenated."""
    found: dict[str, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                for name, text in choice["delta"].items():
                    found[name] = found.get(name, "") + text
    return found


@pytest.fixture
def thinker(make_server: Callable[..., Any]) -> Callable[..., Any]:
    """``thinker(answer=…, opening=…, **options of make_server)`` → a server whose model says that."""

    def make(answer: str = ANSWER, opening: str = "", **options: Any) -> Any:
        server = make_server(**({"chat_template": THINKS} | options))
        server.engine.answer = answer
        server.engine.opening = opening
        return server

    return make


@pytest.mark.parametrize(
    ("answer", "opening", "reasoning", "content"),
    [
        (ANSWER, "", "why not?", "Yes."),
        ("why not?</think>Yes.", "<think>\n", "why not?", "Yes."),
        ("Yes.", "<think>\n\n</think>\n\n", "", "Yes."),
        ("Yes.", "", "", "Yes."),
        ("<think>cut off", "", "cut off", ""),
        ("<think>cut off </thi", "", "cut off </thi", ""),
        ("<thi", "", "", "<thi"),
    ],
)
def test_answers_are_split_the_same_way_streamed_or_not(
    thinker: Callable[..., Any], events: Events, answer: str, opening: str, reasoning: str, content: str
) -> None:
    server = thinker(answer, opening)
    fields: dict[str, Any] = {"max_tokens": len(answer), "n": 2, "temperature": 1, "logprobs": True}
    body = server.chat(**fields).json()
    chunks = events(server.chat(**fields, stream=True))
    for index in range(2):
        message = body["choices"][index]["message"]
        assert message["content"] == content
        assert message["reasoning"] == message["reasoning_content"] == (reasoning or None)
        streamed = collected(chunks, index)
        assert streamed["content"] == content
        assert streamed.get("reasoning", "") == streamed.get("reasoning_content", "") == reasoning
        tokens = [
            entry["token"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == index and choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert tokens == list(answer)


def test_no_piece_is_reasoning_and_content_at_once(thinker: Callable[..., Any], events: Events) -> None:
    chunks = events(thinker().chat(max_tokens=len(ANSWER), stream=True))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert not any(delta.get("content") and delta.get("reasoning") for delta in deltas)


@pytest.mark.parametrize(
    "options", [{"chat_template": "{{ messages }}"}, {"chat_template": None}, {"reasoning_parser": "none"}], ids=str
)
def test_without_a_format_nothing_is_split_and_no_field_speaks_of_it(
    thinker: Callable[..., Any], events: Events, options: dict[str, Any]
) -> None:
    server = thinker(**options)
    message = server.chat(max_tokens=len(ANSWER)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": ANSWER, "refusal": None}
    chunks = events(server.chat(max_tokens=len(ANSWER), stream=True))
    assert collected(chunks) == {"role": "assistant", "content": ANSWER}


@pytest.mark.parametrize("name", ["think", "deepseek_r1", "qwen3", "glm45", "olmo3", "step3p5"])
def test_a_parser_that_is_named_needs_no_template(thinker: Callable[..., Any], name: str) -> None:
    server = thinker(chat_template=None, reasoning_parser=name)
    message = server.chat(max_tokens=len(ANSWER)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("why not?", "Yes.")


def test_completions_are_not_split(thinker: Callable[..., Any]) -> None:
    assert thinker().complete(max_tokens=len(ANSWER)).json()["choices"][0]["text"] == ANSWER


def test_earlier_reasoning_reaches_the_template_under_either_name(thinker: Callable[..., Any]) -> None:
    server = thinker()
    messages = [
        {"role": "assistant", "content": "a", "reasoning": "new name"},
        {"role": "assistant", "content": "b", "reasoning_content": "old name"},
        {"role": "user", "content": "c"},
    ]
    assert server.chat(messages=messages).status_code == 200
    rendered, _ = server.engine.rendered[-1]
    assert [message.get("reasoning_content") for message in rendered] == ["new name", "old name", None]


def test_variables_reach_the_template(thinker: Callable[..., Any]) -> None:
    server = thinker()
    assert server.chat(chat_template_kwargs={"enable_thinking": False}).status_code == 200
    assert server.engine.rendered[-1][1]["template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("answer", "opening", "tokens"),
    [
        (ANSWER, "", len("\nwhy not?\n")),  # a token a character: those between the markers
        ("\n <think>abc</think>", "", 3),
        ("why not?</think>Yes.", "<think>\n", len("why not?")),
        ("Yes. <think>not now</think>", "", 0),
        ("Yes.", "<think>\n\n</think>\n\n", 0),
        ("<think>cut off </thi", "", len("cut off </thi")),
        ("<thi", "", 0),
    ],
)
def test_usage_counts_the_tokens_of_reasoning_the_same_way_streamed_or_not(
    thinker: Callable[..., Any], events: Events, answer: str, opening: str, tokens: int
) -> None:
    server = thinker(answer, opening)
    fields: dict[str, Any] = {"max_tokens": len(answer), "n": 2, "temperature": 1}
    details = {"reasoning_tokens": 2 * tokens}
    assert server.chat(**fields).json()["usage"]["completion_tokens_details"] == details
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server.chat(**fields, stream=True, stream_options=options))
    assert chunks[-1]["usage"]["completion_tokens_details"] == details
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert len(counts) > len(answer)


def test_usage_does_not_speak_of_reasoning_where_there_is_no_format(thinker: Callable[..., Any]) -> None:
    assert "completion_tokens_details" not in thinker(reasoning_parser="none").chat().json()["usage"]
    assert "completion_tokens_details" not in thinker().complete().json()["usage"]
