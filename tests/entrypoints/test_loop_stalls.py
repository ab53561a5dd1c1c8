"""A large request holds up nobody else: however much there is to take apart, probes are answered meanwhile."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from octavo.entrypoints import request_body
from octavo.entrypoints.openai.responses import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    TokenDetails,
    TopLogprob,
    Usage,
    encode,
    encode_in_pieces,
)
from tests.entrypoints.conftest import FakeAsyncLLM, Server
from tests.entrypoints.wire import WireServer, head, receive_all

MILLION = 1 << 20
# Seconds; a machine that does other things, too.
BOUND = 0.8


class Probing:
    """Asks /health all the time. ``worst``: the longest that it took."""

    def __init__(self, wire: WireServer) -> None:
        self.worst = 0.0
        self._wire = wire
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._wire.connect() as client:
            while not self._stopped.wait(0.002):
                began = time.monotonic()
                client.sendall(head("GET", "/health"))
                assert client.recv(4096)
                self.worst = max(self.worst, time.monotonic() - began)

    def __enter__(self) -> "Probing":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopped.set()
        self._thread.join()


class Engine(FakeAsyncLLM):
    """Works on text in threads, as the real one."""

    async def process_inputs(self, prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
        return await asyncio.to_thread(self._inputs.process, request_id, prompt, params, **options)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[WireServer]:
    monkeypatch.setattr("tests.entrypoints.conftest.FakeAsyncLLM", Engine)
    wire = WireServer(Server(max_body_bytes=32 * MILLION).app)
    yield wire
    wire.stop()


def post(wire: WireServer, path: str, body: bytes) -> bytes:
    lines = ["Content-Type: application/json", "Connection: close", f"Content-Length: {len(body)}"]
    with wire.connect() as client:
        client.sendall(head("POST", path, *lines) + body)
        return receive_all(client)


KEYS = b'{"prompt":"a",' + b",".join(b'"%d":1' % number for number in range(2 * MILLION)) + b"}"
LISTS = b'{"prompt":[' + b"[]," * (4 * MILLION) + b"[]]}"
IDS = b'{"tokens":[' + b",".join(b"%d" % (number % 290) for number in range(4 * MILLION)) + b"]}"
STRINGS = b'{"prompt":[' + b'"a,[{:",' * MILLION + b'""]}'
BODIES = {
    "keys": ("/v1/completions", KEYS, b"more than 524288 arrays, objects and fields"),
    "lists": ("/v1/completions", LISTS, b"more than 524288 arrays, objects and fields"),
    "numbers": ("/v1/completions", b'{"prompt":[' + b"1," * (5 * MILLION) + b"1]}", b"more than 4259840 values"),
    "strings": ("/v1/completions", STRINGS, b"prompt must be at most 1024 prompts"),
    "ids": ("/detokenize", IDS, b'{"prompt":'),
}


@pytest.mark.parametrize("name", BODIES)
def test_probes_are_answered_while_a_large_body_is_taken_apart(wire: WireServer, name: str) -> None:
    path, body, answered = BODIES[name]
    with Probing(wire) as probing:
        assert answered in post(wire, path, body)
    assert probing.worst < BOUND


def test_without_bounds_they_are_not(wire: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(request_body, "_check_parts", lambda body: None)
    with Probing(wire) as probing:
        post(wire, "/v1/completions", LISTS)
    assert probing.worst > BOUND


def test_what_is_within_strings_does_not_count(make_server: Any) -> None:
    """Texts may be full of what a JSON object is made of."""
    server = make_server(max_body_bytes=4 * MILLION)
    text = '[{:"\\' * 200_000
    assert sum(map(text.count, "[{:")) > request_body._MOST_CONTAINERS
    answer = server.tokenize(prompt=text)
    assert answer.status_code == 200
    assert answer.json()["count"] == len(text)
    refused = server.post("/tokenize", b'{"prompt":"", "x":[' + b"[]," * request_body._MOST_CONTAINERS + b"[]]}")
    assert refused.status_code == 400


def answers() -> Iterator[Any]:
    usage = Usage(1, 2, 3, TokenDetails(0))
    tables: Any = [None, *({str(n): PromptLogprob(-n / 7, n, f'"{n}\n')} for n in range(40_000))]
    flat = CompletionLogprobs([*range(20_000)], [None, -0.5], ["é", "\x00"], [None, {"a": -1.0}])
    choices = [CompletionChoice(0, "text", flat, "stop", 7, tables, [1, 2]), CompletionChoice(1, "")]
    yield Completion(id="a", created=1, model="m", choices=choices, usage=usage)
    top = [TopLogprob("x", -1.0, (120,))] * 3
    chat = ChatLogprobs([ChatTokenLogprob("x", -1.0, (120,), top)] * 20_000)
    message = ChatMessage("assistant", "hi", None, "because")
    choice = ChatChoice(0, message, chat, "length", None, [*range(20_000)])
    yield ChatCompletion(id="a", created=1, model="m", choices=[choice], usage=usage, prompt_logprobs=tables)
    yield Completion(id="", created=0, model="", choices=[])


@pytest.mark.parametrize("answer", [*answers()], ids=lambda answer: type(answer).__name__)
def test_an_answer_encoded_in_pieces_is_the_same(answer: Any) -> None:
    assert encode_in_pieces(answer) == encode(answer)


def test_no_piece_of_an_answer_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr("octavo.entrypoints.openai.responses.encode", lambda value: sizes.append(size(value)) or b"[]")
    for answer in answers():
        encode_in_pieces(answer)
    assert max(sizes) <= 1 << 14
    assert len(sizes) > 40_000


def size(value: Any) -> int:
    return len(value) if isinstance(value, list) else 1


def test_a_large_answer_is_whole(wire: WireServer) -> None:
    answer = post(wire, "/v1/completions", b'{"prompt":"abc","prompt_logprobs":9,"logprobs":2,"max_tokens":3}')
    choice = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["choices"][0]
    assert len(choice["prompt_logprobs"]) == len(choice["logprobs"]["tokens"]) == 3
