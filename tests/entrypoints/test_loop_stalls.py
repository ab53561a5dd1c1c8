"""A large request holds up nobody else: however much there is to take apart, probes are answered meanwhile."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.entrypoints import request_body
from tests.entrypoints.conftest import FakeAsyncLLM, Server
from tests.entrypoints.wire import WireServer, head, receive_all

MILLION = 1 << 20
# Seconds that this process computes: what else the machine does counts for nothing.
BOUND = 0.5


class Probing:
    """Asks /health all the time. ``worst``: the most that the server's process has computed from one answer to the
    next: nothing but computing holds the loop up here. It is a thread of that process, so that what holds it up between
    two probes counts, too."""

    def __init__(self, wire: WireServer) -> None:
        self.worst = 0.0
        self._wire = wire
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._wire.connect() as client:
            answered = time.process_time()
            while not self._stopped.wait(0.002):
                client.sendall(head("GET", "/health"))
                assert client.recv(4096)
                now = time.process_time()
                self.worst, answered = max(self.worst, now - answered), now

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


def test_without_bounds_they_wait_much_longer(wire: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    with Probing(wire) as bounded:
        post(wire, "/v1/completions", LISTS)
    monkeypatch.setattr(request_body, "_check_parts", lambda body: None)
    with Probing(wire) as probing:
        post(wire, "/v1/completions", LISTS)
    assert probing.worst > 2 * bounded.worst
