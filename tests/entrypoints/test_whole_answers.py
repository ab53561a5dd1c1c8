"""A whole answer leaves the process by one write: whoever kills it in between leaves no client with a head alone."""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from octavo.entrypoints import http_protocol
from tests.entrypoints.wire import WireServer, head

TEXT = "text " * 1000
SEGMENTS_WITH_DATA = 152  # where Linux's tcp_info has tcpi_data_segs_in


class App:
    """Answers by path. ``go_on``: lets the parts of a stream through, one by one."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/cut":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
            raise RuntimeError("on purpose")
        if scope["method"] == "POST":
            await receive()
        answers = {"/json": JSONResponse({"a": TEXT}), "/nothing": Response(status_code=204), "/empty": Response("")}
        await answers.get(scope["path"], StreamingResponse(self.parts()))(scope, receive, send)

    async def parts(self) -> Any:
        for _ in range(2):
            await asyncio.to_thread(self.go_on.acquire)
            yield "part"


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def client(app: App) -> Iterator[socket.socket]:
    wire = WireServer(app)
    with wire.connect() as client:
        yield client
    wire.stop()


def num_segments(client: socket.socket) -> int:
    """With data, that have come; the server does not delay what it writes, so each write is one."""
    info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SEGMENTS_WITH_DATA + 4)
    return int(struct.unpack_from("I", info, SEGMENTS_WITH_DATA)[0])


def receive(client: socket.socket, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        part = client.recv(1 << 16)
        assert part, found
        found += part
    return found


ANSWERS = {
    "body": (head("GET", "/json"), b'"}'),
    "body, then closed": (head("GET", "/json", "Connection: close"), b'"}'),
    "no length": (head("GET", "/nothing"), b"\r\n\r\n"),
    "length 0": (head("GET", "/empty"), b"\r\n\r\n"),
    "HEAD": (head("HEAD", "/json"), b"\r\n\r\n"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_whole_answer_is_one_write(client: socket.socket, name: str) -> None:
    request, end = ANSWERS[name]
    for count in (1,) if b"close" in request else (1, 2, 3):
        client.sendall(request)
        assert receive(client, end).startswith(b"HTTP/1.1 20")
        assert num_segments(client) == count


def test_they_would_be_two(monkeypatch: pytest.MonkeyPatch, app: App) -> None:
    """The control."""
    monkeypatch.setattr(http_protocol, "WholeAnswers", lambda cycle: cycle.transport)
    wire = WireServer(app)
    with wire.connect() as client:
        client.sendall(head("GET", "/json"))
        receive(client, b'"}')
        assert num_segments(client) == 2
    wire.stop()


def test_who_waits_to_be_asked_for_the_body_is_asked_before_there_is_an_answer(client: socket.socket) -> None:
    client.sendall(head("POST", "/json", "Expect: 100-continue", "Content-Length: 2"))
    assert receive(client, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(b"ab")
    assert receive(client, b'"}').startswith(b"HTTP/1.1 200 OK\r\n")
    assert num_segments(client) == 2


def test_the_head_of_a_stream_waits_for_nothing(client: socket.socket, app: App) -> None:
    client.sendall(head("GET", "/stream"))
    assert receive(client, b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK\r\n")
    app.go_on.release()
    assert receive(client, b"part\r\n") == b"4\r\npart\r\n"
    app.go_on.release()
    assert receive(client, b"0\r\n\r\n") == b"4\r\npart\r\n0\r\n\r\n"


def test_an_answer_that_fails_before_its_body_is_none(client: socket.socket) -> None:
    client.sendall(head("GET", "/cut"))
    assert client.recv(1 << 16) == b""
