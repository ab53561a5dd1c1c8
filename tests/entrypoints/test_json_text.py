"""A field that stands twice in one object of a body is refused by its name: which of both was meant nobody knows. Half
of a surrogate pair is called that, wherever it stands."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.entrypoints.batch.batch_line import BadLine, read_line
from octavo.entrypoints.json_text import lone_surrogate, repeated_field

Error = Callable[..., dict[str, Any]]

BODIES = {
    "/v1/completions": b'{"model": "m", "prompt": "hi", "max_tokens": 4, "max_tokens": 5}',
    "/v1/chat/completions": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "max_tokens": 5}',
    "/tokenize": b'{"prompt": "a", "max_tokens": 4, "max\\u005ftokens": 4}',
    "/detokenize": b'{"tokens":[1],"max_tokens":{"a":1},"max_tokens":null}',
}


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_is_there_twice_is_refused_by_name(server: Any, error: Error, path: str) -> None:
    message = error(server.post(path, BODIES[path]), 400, "max_tokens")["message"]
    assert message.startswith("max_tokens is there more than once")
    once = json.dumps(json.loads(BODIES[path]) | {"max_tokens": 4}).encode()
    assert server.post(path, once).status_code == 200  # the control


def test_one_of_an_object_within_is_too(server: Any, error: Error) -> None:
    body = b'{"messages": [{"role": "user", "content": "a", "content": "b"}], "max_tokens": 1}'
    refused = error(server.post("/v1/chat/completions", body), 400)
    assert refused["message"].startswith("content is there more than once in one object")
    assert refused["param"] is None


def test_of_a_large_body_only_that_is_told(make_server: Any, error: Error) -> None:
    server = make_server(max_body_bytes=1 << 20)
    body = b'{"prompt": "%b", "max_tokens": 1, "max_tokens": 2}' % (b"x" * 100_000)
    assert error(server.post("/v1/completions", body), 400)["message"].startswith("a field is there more than once")


def test_a_line_of_a_batch_is_bad_with_one() -> None:
    line = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"%b}}'
    assert read_line(line % b"").body == {"prompt": "a"}
    with pytest.raises(BadLine, match="prompt is there more than once"):
        read_line(line % b', "prompt": "b"')


scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.text() | st.sampled_from([':"', "\\", '\\":{', "a:b"])
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.dictionaries(st.text(), values), st.booleans(), st.sampled_from([None, (",", ":"), (" , ", " : ")]))
def test_of_what_any_body_says_once_nothing_is_refused(value: Any, ascii_only: bool, separators: Any) -> None:
    """Until it says something twice, on its top or within."""
    text = json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode("utf-8", "replace")
    kept = msgspec.json.decode(text)
    assert repeated_field(text, kept) is None
    for name in kept:
        twice = text[:-1] + b"," + json.dumps({name: 1})[1:].encode()
        assert repeated_field(twice, msgspec.json.decode(twice)) == (name, True)
        within = b'{"a":[%b]}' % twice
        assert repeated_field(within, msgspec.json.decode(within)) == (name, False)


HALVES = [
    r"\ud800",
    r"\uDBFF",
    r"\udc00",
    r"\uDfff",
    r"\\\ud83d",
    r"\ud800\ud83d\ude00",
    r"\ud83d\ude00\udc00",
    r"\ud83d\u0061",
]
PAIRS = [r"\ud83d\ude00", r"\\ud800", r"\\\\udc00", r"\ud83d\ude00\uD83D\uDE00", "ud800", r"\u0d80"]


@pytest.mark.parametrize("after", ["", "abc", "x" * 80])
@pytest.mark.parametrize("half", HALVES)
def test_half_a_surrogate_pair_is_called_that(server: Any, error: Error, half: str, after: str) -> None:
    for body in (b'{"prompt":"%b"}', b'{"prompt":"a","%b":1}', b'{"prompt":"' + b"x" * 15_000 + b'%b"}'):
        refused = error(server.post("/v1/completions", body % (half + after).encode()), 400)
        assert refused["message"].endswith(", half of a surrogate pair, which is not text")
    with pytest.raises(BadLine, match="half of a surrogate pair"):
        read_line(b'{"custom_id": "%b"}' % half.encode())


@pytest.mark.parametrize("pair", PAIRS)
def test_what_looks_like_one_is_none(server: Any, error: Error, pair: str) -> None:
    """The control."""
    body = b'{"prompt":"a","max_tokens":1,"user":"%b"}' % pair.encode()
    assert server.post("/v1/completions", body).status_code == 200
    assert lone_surrogate(body) is None
    for num_cut in range(1, len(pair) + 2):
        assert "truncated" in error(server.post("/v1/completions", body[:-num_cut]), 400)["message"]
