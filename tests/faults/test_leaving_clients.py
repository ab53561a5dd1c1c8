"""C1, C2: what a client has left behind is freed within a step, wherever its request was; and a full queue refuses."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.canary import Canary
from tests.faults.server_process import Server, wait_until

LENGTH = 8192
TOKENS_A_STEP = 16
LONG_ANSWER = {"max_tokens": LENGTH - 100}
LONG_PROMPT = {"max_tokens": 4}
TEXT = "hello, how are you? " * 1000
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(make_tiny_llama: Callable[..., Path]) -> Iterator[Server]:
    """One request runs, and a prompt of thousands of tokens is in prefill for seconds."""
    model = make_tiny_llama(max_position_embeddings=LENGTH)
    server = Server(
        str(model),
        *("--served-model-name", "m", "--max-num-seqs", "1", "--max-num-batched-tokens", str(TOKENS_A_STEP)),
        *("--max-num-queued-reqs", "300"),
    )
    yield server.wait_ready()
    server.close()


@pytest.fixture(scope="module")
def canary(server: Server) -> Canary:
    return Canary(server)


def ask(server: Server, path: str, text: str, **fields: Any) -> socket.socket:
    """A request that has been sent; nothing of its answer has been read."""
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    body = {"model": "m", "ignore_eos": True, "temperature": 1, "seed": 1} | asked | fields
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(head.encode() + data)
    return client


def has(server: Server, running: int, waiting: int) -> bool:
    return (server.metric("num_requests_running"), server.metric("num_requests_waiting")) == (running, waiting)


def has_come_to_rest(server: Server) -> bool:
    return has(server, 0, 0) and server.metric("kv_cache_usage_perc") == 0


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_is_freed_when_its_client_leaves(
    server: Server, canary: Canary, path: str, stream: bool, n: int
) -> None:
    """In prefill, while it generates, and while it waits: then the one that runs goes on."""
    with ask(server, path, TEXT, n=n, stream=stream, **LONG_PROMPT):
        assert wait_until(lambda: has(server, 1, n - 1))
        assert server.metric("kv_cache_usage_perc") > 0
    assert wait_until(lambda: has_come_to_rest(server), seconds=1)
    generated = server.metric("generation_tokens_total")
    with ask(server, path, "hi", n=n, stream=stream, **LONG_ANSWER):
        assert wait_until(lambda: server.metric("generation_tokens_total") > generated)
        with ask(server, path, TEXT, n=n, stream=stream, **LONG_PROMPT):
            assert wait_until(lambda: has(server, 1, 2 * n - 1))
        assert wait_until(lambda: has(server, 1, n - 1), seconds=1)
    assert wait_until(lambda: has_come_to_rest(server), seconds=1)
    canary.check()


def test_two_hundred_that_give_up_do_not_hold_up_the_next(server: Server, canary: Canary) -> None:
    clients = [ask(server, COMPLETION, f"{number} {TEXT}", **LONG_PROMPT) for number in range(200)]
    time.sleep(0.5)
    for client in clients:
        client.close()
    started = time.monotonic()
    answer = server.complete()
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - started < 5
    assert wait_until(lambda: has_come_to_rest(server))
    canary.check()


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_is_a_status_with_the_time_to_come_again(
    server: Server, canary: Canary, path: str, stream: bool
) -> None:
    with ask(server, path, "hi", **LONG_ANSWER):
        assert wait_until(lambda: has(server, 1, 0))
        for refused in (True, False):  # the control: one less is let in
            with ask(server, path, "hi", n=301 - (not refused), stream=stream, max_tokens=1) as client:
                if refused:
                    client.settimeout(10)
                    head = client.recv(10_000).decode()
                    assert head.startswith("HTTP/1.1 503")
                    assert "retry-after: " in head.lower()
                else:
                    assert wait_until(lambda: has(server, 1, 300))
    assert wait_until(lambda: has_come_to_rest(server))
    canary.check()
