"""How a chat request may shape its prompt: going on with a message, documents, and (if trusted) its own template."""

from collections.abc import Callable
from typing import Any

import pytest

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once "}]
TEMPLATE = "{{ messages | length }}!"


def prompt_of(response: Any) -> str:
    """The prompt, from its ids: a token a byte."""
    assert response.status_code == 200, response.text
    body = response.json()
    ids = body["prompt_token_ids"] if "prompt_token_ids" in body else body["tokens"]
    return bytes(token_id - 3 for token_id in ids).decode()


@pytest.fixture(params=["chat", "tokenize"])
def ask(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``ask(server, messages=…, …)`` over each route that renders chats."""

    def send(server: Any, **fields: Any) -> Any:
        fields = {"messages": [{"role": "user", "content": "hi"}]} | fields
        if request.param == "chat":
            fields |= {"return_token_ids": True}
        return getattr(server, request.param)(**fields)

    return send


@pytest.fixture
def opening_server(server: Any) -> Any:
    server.engine.opening = "|a:"
    return server


def test_the_prompt_ends_as_is_asked(opening_server: Any, ask: Callable[..., Any]) -> None:
    server = opening_server
    assert prompt_of(ask(server)) == "u:hi|a:"
    assert prompt_of(ask(server, add_generation_prompt=True)) == "u:hi|a:"
    assert prompt_of(ask(server, add_generation_prompt=False)) == "u:hi"
    assert prompt_of(ask(server, messages=TALK, continue_final_message=True)) == "u:hia:Once "
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt_of(ask(server, messages=TALK, **fields)) == "u:hia:Once "


def test_a_new_message_and_an_old_one_cannot_both_come_last(server: Any, ask: Any, error: Any) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": True}
    error(ask(server, messages=TALK, **fields), 400, "continue_final_message")
    silent = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]
    error(ask(server, messages=silent, continue_final_message=True), 400, "continue_final_message")


def test_documents_reach_the_template(server: Any, ask: Any, error: Any) -> None:
    assert prompt_of(ask(server, documents=[{"text": "one"}, {"text": "two"}])) == "u:hi[one][two]"
    assert prompt_of(ask(server, documents=[])) == "u:hi"
    error(ask(server, documents=["one"]), 400, "documents")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": TEMPLATE}, "chat_template"),
        ({"chat_template": ""}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": TEMPLATE}}, "chat_template_kwargs"),
    ],
    ids=["body", "empty", "kwargs"],
)
def test_a_template_is_taken_from_nobody_who_is_not_trusted(
    make_server: Any, ask: Any, error: Any, fields: dict[str, Any], param: str
) -> None:
    """A18, and its control: the same request where templates are taken."""
    server = make_server()
    message = error(ask(server, **fields), 400, param)["message"]
    assert "--trust-request-chat-template" in message
    assert server.engine.rendered == []
    trusting = make_server(trust_request_chat_template=True)
    ask(trusting, **fields)
    assert trusting.engine.rendered[0][1]["chat_template"] == (fields.get("chat_template", TEMPLATE))


def test_a_trusted_template_is_used(make_server: Any, ask: Any) -> None:
    server = make_server(trust_request_chat_template=True)
    assert prompt_of(ask(server, chat_template=TEMPLATE)) == "1!"
    assert prompt_of(ask(server, messages=TALK, chat_template_kwargs={"chat_template": TEMPLATE})) == "2!"
    assert prompt_of(ask(server)) == "u:hi"


@pytest.mark.parametrize(
    ("template", "param"),
    [
        ("{% if %}", "chat_template"),
        ("{{ ''.__class__.__mro__ }}", "chat_template"),
        ("{{ 'a' * 10**10 }}", "chat_template"),
        ("x" * 70_000, "chat_template"),
        (5, "chat_template"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_trusted_template_does_no_harm(make_server: Any, ask: Any, error: Any, template: Any, param: str) -> None:
    server = make_server(trust_request_chat_template=True, max_body_bytes=200_000)
    error(ask(server, chat_template=template), 400, param)
    assert ask(server).status_code == 200


def test_two_templates_are_one_too_many(make_server: Any, ask: Any, error: Any) -> None:
    server = make_server(trust_request_chat_template=True)
    fields = {"chat_template": TEMPLATE, "chat_template_kwargs": {"chat_template": TEMPLATE}}
    error(ask(server, **fields), 400, "chat_template_kwargs")
    error(ask(server, chat_template_kwargs={"chat_template": 5}), 400)


# the answer of a message that is gone on with ------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["Once ", [{"type": "text", "text": "Once "}]], ids=["text", "parts"])
def test_an_echo_is_the_message_as_it_goes_on(server: Any, events: Callable[..., Any], content: Any) -> None:
    messages = [TALK[0], {"role": "assistant", "content": content}]
    fields = {"messages": messages, "continue_final_message": True, "echo": True, "n": 2, "temperature": 1}
    answers = [choice["message"]["content"] for choice in server.chat(**fields).json()["choices"]]
    assert answers == ["Once abcd", "Once abcd"]
    for index in range(2):
        deltas = [
            choice["delta"].get("content", "")
            for chunk in events(server.chat(**fields, stream=True))
            for choice in chunk["choices"]
            if choice["index"] == index
        ]
        assert "".join(deltas) == "Once abcd"
    assert server.chat(**fields | {"echo": False}).json()["choices"][0]["message"]["content"] == "abcd"
    assert server.chat(echo=True).json()["choices"][0]["message"]["content"] == "abcd"  # the last word is the user's


@pytest.mark.parametrize(
    ("begun", "said", "reasoning", "content"),
    [
        ("<think>why", " not?</think>Yes.", " not?", "Yes."),
        ("<think>why</think>Ye", "s, <think>", None, "s, <think>"),
        ("Ye", "s.", None, "s."),
        ("<think>", "why?</think>Yes.", "why?", "Yes."),
        ("", "<think>why?</think>Yes.", "why?", "Yes."),
    ],
)
def test_reasoning_goes_on_where_the_message_stopped(
    make_server: Any, begun: str, said: str, reasoning: str | None, content: str
) -> None:
    server = make_server(chat_template="<think>")
    server.engine.answer = said
    messages = [TALK[0], {"role": "assistant", "content": begun}]
    response = server.chat(messages=messages, continue_final_message=True, max_tokens=len(said))
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (reasoning, content)
