"""POST /tokenize and /detokenize: shapes, both ways, and every mistake refused without touching the engine."""

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.config import HttpConfig
from octavo.entrypoints import build_app

VOCAB_SIZE = 300
HUGE = 2**63
Error = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def nothing_is_started(server: Any, canary: None) -> Iterator[None]:
    """Neither route has anything for the engine to do."""
    yield
    assert server.engine.started == []


def test_a_text_is_tokenized(server: Any) -> None:
    response = server.tokenize(model="m", prompt="hi")
    assert response.json() == {"count": 2, "max_model_len": 64, "tokens": [107, 108], "token_strs": None}
    assert response.headers["x-request-id"]
    body = server.tokenize(prompt="é</s>", return_token_strs=True).json()
    assert (body["tokens"], body["token_strs"]) == ([198, 172, 2], ["Ã", "©", "</s>"])


def test_special_tokens_are_put_around_a_text_unless_told_otherwise(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    encode = server.engine.tokenizer.encode
    monkeypatch.setattr(
        server.engine.tokenizer, "encode", lambda text, special: asked.append(special) or encode(text, special)
    )
    for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        assert server.tokenize(prompt="hi", **fields).status_code == 200
    assert asked == [True, True, False]
    monkeypatch.undo()


def test_a_chat_is_tokenized_as_it_would_be_answered(server: Any) -> None:
    messages = [{"role": "user", "content": "hi</s>"}]
    body = server.tokenize(messages=messages, return_token_strs=True).json()
    asked = server.chat(messages=messages, return_token_ids=True).json()
    server.engine.started.clear()
    assert body["tokens"] == asked["prompt_token_ids"]
    assert body["count"] == asked["usage"]["prompt_tokens"] == len("u:hi</s>")  # the user's text stays text
    assert body["token_strs"] == list("u:hi</s>")


def test_a_text_that_does_not_fit_can_be_counted(server: Any) -> None:
    assert server.tokenize(prompt="x" * 1000).json()["count"] == 1000
    assert server.tokenize(prompt="").json()["count"] == 0


def test_names_of_tokens_are_made_once_and_off_the_loop(make_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(max_body_bytes=1 << 20)
    made: list[tuple[int, int]] = []
    token_string = server.engine.tokenizer.token_string

    def record(token_id: int) -> str:
        made.append((token_id, threading.get_ident()))
        return str(token_string(token_id))

    monkeypatch.setattr(server.engine.tokenizer, "token_string", record)
    body = server.tokenize(prompt="xyx" * 10_000, return_token_strs=True).json()
    assert body["token_strs"] == list("xyx") * 10_000
    assert len(made) == 2
    assert threading.get_ident() not in {thread for _, thread in made}  # where the loop of these tests runs


def test_ids_become_the_text_they_came_from(server: Any) -> None:
    for text in ("hi", "é 🙂\n", "a</s>b"):
        tokens = server.tokenize(prompt=text).json()["tokens"]
        assert server.detokenize(model="m", tokens=tokens).json() == {"prompt": text}
    assert server.detokenize(tokens=[100, 280, 101]).json() == {"prompt": "ab"}  # an id of V without a token


@pytest.mark.parametrize(
    "tokens", [[], [-1], [VOCAB_SIZE], [HUGE], [2**64], [1.5], ["x"], [True], [None], "5", 5, None]
)
def test_ids_that_are_none_are_refused(server: Any, error: Error, tokens: Any) -> None:
    error(server.detokenize(tokens=tokens), 400, "tokens")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [5, 6]}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ({"prompt": "a", "request_id": "two words"}, "request_id"),
        ({"messages": []}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, "tools"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}}, None),
        ({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": 1}, "add_generation_prompt"),
    ],
    ids=str,
)
def test_wrong_texts_and_chats(server: Any, error: Error, fields: dict[str, Any], param: str | None) -> None:
    error(server.tokenize(**fields), 400, param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_rest_is_as_everywhere(server: Any, error: Error, path: str) -> None:
    fields = {"prompt": "a", "tokens": [5]}
    error(server.post(path, fields | {"model": "nope"}), 404, "model")
    for body in (b"", b"[]", b'{"model":', b"null", b'{"prompt":"\\ud800","tokens":[5]}'):
        error(server.post(path, body), 400)
    error(server.post(path, b"{}", headers={"content-type": "text/plain"}), 400)
    error(server.post(path, b'{"prompt":"' + b"x" * 30_000 + b'"}'), 413)
    error(server.get(path), 405)
    assert server.post(path, fields, headers={"x-request-id": "trace"}).headers["x-request-id"] == "trace"


def test_the_bounds_on_length(make_server: Any, error: Error) -> None:
    server = make_server(max_body_bytes=1 << 25)
    error(server.post("/tokenize", {"prompt": "x" * ((1 << 22) + 1)}), 400, "prompt")
    error(server.post("/detokenize", {"tokens": [5] * ((1 << 22) + 1)}), 400, "tokens")


# ---- GET /tokenizer_info --------------------------------------------------------------------------------------------


def with_info(server: Any, folder: Any) -> Any:
    """The same server, asked to tell of its tokenizer."""
    config = dataclasses.replace(server.state.config, http=HttpConfig(enable_tokenizer_info_endpoint=True))
    server.state.config = config
    engine = server.engine
    model = dataclasses.replace(engine.config.model, tokenizer_path=str(folder))
    engine.config = dataclasses.replace(engine.config, model=model)
    server.app = build_app(server.state)
    return server


def test_the_tokenizers_settings_are_told_where_that_was_asked_for(make_server: Any, tmp_path: Any) -> None:
    settings = {"tokenizer_class": "LlamaTokenizer", "model_max_length": 10**30, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    server = make_server(chat_template="{{ messages }}")
    assert server.get("/tokenizer_info").status_code == 404
    told = with_info(server, tmp_path).get("/tokenizer_info")
    assert told.status_code == 200
    assert told.json() == {
        "tokenizer_class": "LlamaTokenizer",
        "model_max_length": 10**30,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ messages }}",
    }


def test_a_model_without_such_a_file_tells_what_is_in_use(server: Any, tmp_path: Any) -> None:
    told = with_info(server, tmp_path / "model.gguf").get("/tokenizer_info").json()
    assert told == {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
