"""Completions that begin with their prompt, and what else concerns prompts: logprobs, token ids, a gap to be filled."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from octavo.entrypoints.openai.logprobs import LogprobForms

Events = Callable[..., list[Any]]


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The chunks of one choice as one choice."""
    whole: dict[str, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            for name, value in choice.items():
                if name == "logprobs" and value is not None:
                    lists = whole.setdefault("logprobs", {key: [] for key in value})
                    for key, entries in value.items():
                        lists[key] += entries
                elif name in ("text", "token_ids"):
                    whole[name] = whole.get(name, value[:0]) + value
                elif value is not None or name not in whole:
                    whole[name] = value
    return whole


@pytest.mark.parametrize("prompt", ["hi", [107, 108]])
def test_the_prompts_text_comes_first(server: Any, prompt: Any) -> None:
    assert server.complete(prompt=prompt, echo=True).json()["choices"][0]["text"] == "hiabcd"


def test_an_echo_with_logprobs_has_null_for_the_first_token(server: Any) -> None:
    choice = server.complete(prompt="hi", echo=True, logprobs=1).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "i", "a", "b", "c", "d"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -1.5, -0.5, -1.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"<1>": -0.1, "i": -0.5}
    assert [choice["text"][offset] for offset in logprobs["text_offset"]] == logprobs["tokens"]


def test_without_echo_the_prompts_logprobs_are_not_among_them(server: Any) -> None:
    assert server.complete(logprobs=1).json()["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    assert server.complete(echo=True).json()["choices"][0]["logprobs"] is None


def test_the_prompt_alone_without_a_generated_token(server: Any, events: Events) -> None:
    """As lm-eval may ask; the engine's one token is not shown and not counted."""
    for fields in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        response = server.complete(prompt=["hi", "you"], echo=True, max_tokens=0, logprobs=1, **fields)
        if fields:
            *chunks, last = events(response)
            choices, usage = [joined(chunks, 0), joined(chunks, 1)], last["usage"]
        else:
            choices, usage = response.json()["choices"], response.json()["usage"]
        assert [choice["text"] for choice in choices] == ["hi", "you"]
        assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
        assert choices[1]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert usage["completion_tokens"] == 0
        assert usage["total_tokens"] == usage["prompt_tokens"] == 5


def test_no_tokens_without_echo_is_refused(server: Any, error: Any) -> None:
    error(server.complete(max_tokens=0), 400, "max_tokens")
    error(server.complete(max_tokens=0, echo=True, min_tokens=2), 400, "min_tokens")
    error(server.chat(max_tokens=0, echo=True), 400, "max_tokens")


@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_echo_is_the_echo(server: Any, events: Events, n: int) -> None:
    fields = {"prompt": ["hi", "you"], "echo": True, "logprobs": 2, "n": n, "temperature": 1, "return_token_ids": True}
    whole = server.complete(**fields).json()["choices"]
    chunks = events(server.complete(**fields, stream=True))
    assert len(whole) == 2 * n
    for choice in whole:
        assert joined(chunks, choice["index"]) == choice


def test_an_echo_of_a_truncated_prompt_is_what_was_left_of_it(server: Any) -> None:
    fields = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True, "logprobs": 0}
    choice = server.complete(**fields).json()["choices"][0]
    assert choice["text"] == "efabcd"
    assert choice["logprobs"]["tokens"][:2] == ["e", "f"]


@pytest.mark.parametrize(("skip", "text", "offsets"), [(True, "ab", [0, 0, 1]), (False, "<s>ab", [0, 3, 4])])
def test_offsets_are_places_in_the_text_that_is_shown(server: Any, skip: bool, text: str, offsets: list[int]) -> None:
    fields = {"prompt": [1, 100, 101], "echo": True, "logprobs": 0, "max_tokens": 0, "skip_special_tokens": skip}
    choice = server.complete(**fields).json()["choices"][0]
    assert choice["text"] == text
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b"]
    assert choice["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize(
    ("prompt", "text", "offsets"),
    [("é!", "é!", [0, 0, 1]), ([198, 100, 101], "\ufffdab", [0, 1, 2])],
    ids=["two bytes are one character", "a byte is none"],
)
def test_a_character_takes_one_place_however_many_tokens_it_has(
    server: Any, prompt: Any, text: str, offsets: list[int]
) -> None:
    choice = server.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=0).json()["choices"][0]
    assert choice["text"] == text
    assert choice["logprobs"]["text_offset"] == offsets


# other things of the prompt ------------------------------------------------------------------------------------------


def test_prompt_logprobs_are_tables_by_token_id(server: Any, error: Any) -> None:
    expected = [None, {"108": {"logprob": -0.5, "rank": 2, "decoded_token": "i"}}]
    choice = server.complete(prompt="hi", prompt_logprobs=0).json()["choices"][0]
    assert choice["prompt_logprobs"] == expected
    body = server.chat(prompt_logprobs=1).json()
    assert [sorted(table or {}) for table in body["prompt_logprobs"]] == [
        [],
        ["201", "61"],
        ["107", "201"],
        ["108", "201"],
    ]
    assert "prompt_logprobs" not in server.complete().json()["choices"][0]
    for ask in (server.complete, server.chat):
        error(ask(prompt_logprobs=1, stream=True), 400, "prompt_logprobs")


def test_an_echo_and_prompt_logprobs_have_as_many_each_as_was_asked(server: Any) -> None:
    choice = server.complete(prompt="hi", echo=True, logprobs=1, prompt_logprobs=3).json()["choices"][0]
    assert len(choice["prompt_logprobs"][1]) == 3
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    choice = server.complete(prompt="hi", echo=True, logprobs=3, prompt_logprobs=1).json()["choices"][0]
    assert len(choice["prompt_logprobs"][1]) == 2
    assert len(choice["logprobs"]["top_logprobs"][1]) == 3


def test_the_logprobs_of_many_prompts_are_bounded_together(make_server: Any, error: Any) -> None:
    server = make_server(max_body_bytes=1 << 22)
    prompts = [[5] * 60] * 1024
    fields = {"prompt": prompts, "max_tokens": 1, "n": 4, "temperature": 1, "logprobs": 20}
    message = error(server.complete(**fields, echo=True), 400, "logprobs")["message"]
    assert str(60 * 1024 * 4 * 21) in message
    assert server.engine.started == []
    assert server.complete(**fields | {"prompt": prompts[:8]}, echo=True).status_code == 200


def test_more_logprobs_than_there_are_tokens_count_as_all_of_them(make_server: Any) -> None:
    server = make_server(max_logprobs=-1)
    assert server.complete(prompt=["hi", "ho"], max_tokens=1, prompt_logprobs=2**31 - 1).status_code == 200


@pytest.mark.parametrize(
    ("door", "name", "fields"),
    [
        ("complete", "completion", {"logprobs": 2}),
        ("complete", "completion", {"logprob_token_ids": [5]}),
        ("complete", "completion", {"logprobs": 2, "echo": True}),
        ("complete", "prompt", {"prompt_logprobs": 2}),
        ("chat", "chat", {"logprobs": True, "top_logprobs": 2}),
        ("chat", "chat", {"logprob_token_ids": [5]}),
        ("chat", "prompt", {"prompt_logprobs": 2}),
    ],
)
def test_tables_are_formed_off_the_loop(
    server: Any, monkeypatch: pytest.MonkeyPatch, door: str, name: str, fields: dict[str, Any]
) -> None:
    """Those of many choices take long, and the loop has others to serve. These tests' loop is in their own thread."""
    threads: set[int] = set()
    form = getattr(LogprobForms, name)

    def record(*args: Any) -> Any:
        threads.add(threading.get_ident())
        return form(*args)

    monkeypatch.setattr(LogprobForms, name, staticmethod(record) if name == "prompt" else record)
    assert getattr(server, door)(**fields).status_code == 200
    assert threads
    assert threading.get_ident() not in threads
    threads.clear()
    if name == "chat":  # control: where there are no tables, a thread would only cost time
        assert server.chat().status_code == 200
        assert threads == {threading.get_ident()}


def test_token_ids_are_returned_where_asked_for(server: Any, events: Events) -> None:
    choice = server.complete(return_token_ids=True).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([107, 108], [100, 101, 102, 103])
    body = server.chat(return_token_ids=True).json()
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == ([120, 61, 107, 108], [100, 101, 102, 103])
    chunks = events(server.chat(return_token_ids=True, stream=True))
    assert chunks[0]["prompt_token_ids"] == [120, 61, 107, 108]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert joined(chunks)["token_ids"] == [100, 101, 102, 103]
    assert "token_ids" not in server.chat().json()["choices"][0]


def test_tokens_are_returned_without_text_too(server: Any, events: Events) -> None:
    server.engine.answer = "\N{ZERO WIDTH SPACE}"
    for ask in (server.complete, server.chat):
        chunks = events(ask(return_token_ids=True, stream=True))
        assert len(joined(chunks)["token_ids"]) == 12  # three bytes each


def test_tokens_may_be_shown_as_ids(server: Any) -> None:
    fields = {"return_tokens_as_token_ids": True}
    logprobs = server.complete(logprobs=1, echo=True, **fields).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:3] == ["token_id:107", "token_id:108", "token_id:100"]
    assert set(logprobs["top_logprobs"][1]) == {"token_id:201", "token_id:108"}
    entry = server.chat(logprobs=True, top_logprobs=1, **fields).json()["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == ("token_id:100", [97])
    assert entry["top_logprobs"][0]["token"] == "token_id:201"


def test_logprobs_of_chosen_tokens(server: Any) -> None:
    logprobs = server.complete(logprob_token_ids=[50, 51]).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "/": -7.0, "0": -7.0}
    content = server.chat(logprob_token_ids=[50]).json()["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "/"]


# a gap to be filled --------------------------------------------------------------------------------------------------


def test_a_suffix_makes_a_prompt_with_a_gap(make_server: Any) -> None:
    server = make_server(with_gap_tokens=True)
    answer = server.complete(prompt=["a", "b"], suffix="c", return_token_ids=True).json()
    prefix, suffix, middle = 259, 260, 261
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [
        [prefix, 100, suffix, 102, middle],
        [prefix, 101, suffix, 102, middle],
    ]
    assert [choice["text"] for choice in answer["choices"]] == ["abcd", "abcd"]


def test_a_gap_that_cannot_be(make_server: Any, error: Any) -> None:
    assert "fill-in-the-middle" in error(make_server().complete(suffix="c"), 400, "suffix")["message"]
    server = make_server(with_gap_tokens=True)
    error(server.complete(prompt=[5, 6], suffix="c"), 400, "suffix")
    error(server.complete(suffix="c", echo=True), 400, "echo")
    error(server.complete(suffix="c", add_special_tokens=False), 400, "add_special_tokens")
    error(server.complete(suffix="c", truncate_prompt_tokens=2), 400, "truncate_prompt_tokens")
    error(server.complete(suffix="c" * 100), 400, "input_tokens")
    assert server.complete(suffix="", echo=True).json()["choices"][0]["text"] == "hiabcd"


def test_prompts_and_the_suffix_of_each_are_bounded_together(make_server: Any, error: Any) -> None:
    """The suffix is sent once, but is encoded, and held, for each prompt."""
    server = make_server(with_gap_tokens=True, max_body_bytes=1 << 20)
    message = error(server.complete(prompt=["a"] * 1024, suffix="c" * 4096), 400, "suffix")["message"]
    assert str(1024 * 4097) in message
    control = server.complete(prompt=["a"] * 100, suffix="c" * 4096)
    assert "prompt 0: the prompt has 4100 tokens" in error(control, 400, "input_tokens")["message"]
