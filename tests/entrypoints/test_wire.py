"""What the HTTP server bears from a client: bytes that are no request, requests that never end, answers that are never
read. Each costs the one who sends it his connection, and nobody else anything."""

import contextlib
import http.client
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.entrypoints import body_refusal
from octavo.entrypoints.http_protocol import HttpProtocol
from tests.entrypoints.conftest import Server
from tests.entrypoints.wire import WireServer, head, receive_all

JSON = "Content-Type: application/json"
BODY = json.dumps({"model": "m", "prompt": "hi", "max_tokens": 4, "temperature": 0}).encode()
COMPLETION = head("POST", "/v1/completions", JSON, f"Content-Length: {len(BODY)}")
CLOSE = "Connection: close"
HEALTH = head("GET", "/health", CLOSE)
LARGE = 50_000_000
MILLION = 1_000_000

Serve = Callable[..., WireServer]


@pytest.fixture(scope="module")
def plain() -> Iterator[WireServer]:
    """A server with the bounds that it has by itself."""
    wire = WireServer(Server().app)
    yield wire
    assert wait_until(lambda: wire.num_connections == 0)
    wire.stop()


@pytest.fixture
def serve(server: Any) -> Iterator[Serve]:
    """``serve(app=the server's own, **limits)`` → WireServer; it is well when the test ends."""
    running = []

    def start(app: Any = None, **limits: Any) -> WireServer:
        running.append(WireServer(app or server.app, **limits))
        return running[-1]

    yield start
    for wire in running:
        assert wait_until(lambda wire=wire: wire.num_connections == 0)
        assert status(wire.talk(HEALTH)) == 200
        wire.stop()
    assert server.engine.running == set()


def wait_until(condition: Callable[[], Any], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    return int(answer[9:12])


def refusal(answer: bytes, code: int) -> str:
    """Asserts that the answer is one error in the shape of all errors; returns its message."""
    assert status(answer) == code, answer[:300]
    top, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in top.lower()
    assert b"content-type: application/json" in top
    error = json.loads(body)["error"]
    assert error["code"] == code
    assert error["param"] is None
    message: str = error["message"]
    return message


# ---- what is no request ----------------------------------------------------------------------------------------------

CHUNKED = head("POST", "/v1/completions", JSON, "Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (head("GET", "/health", "A: " + "a" * 5_000_000), 431),
        (head("GET", "/health", *(f"A{index}: {'a' * 1000}" for index in range(70))), 431),
        (head("GET", "/health", *(f"A{index}: a" for index in range(300))), 431),
        (head("GET", "/health?" + "a" * 9000), 414),
        (head("GET", "/" + "a" * 5_000_000), 414),
        (CHUNKED + b"zz\r\nabc\r\n", 400),
        (CHUNKED + b"3\r\nabcX\r\n0\r\n\r\n", 400),
        (CHUNKED + b"1\r\nx\r\n0\r\nA: " + b"a" * 5_000_000, 431),
        (head("POST", "/v1/completions", JSON, "Content-Length: 3", "Transfer-Encoding: chunked") + b"abc", 400),
        (head("POST", "/v1/completions", JSON, "Content-Length: 3", "Content-Length: 3") + b"abc", 400),
        (head("POST", "/v1/completions", JSON, "Transfer-Encoding: identity") + b"abc", 400),
        (head("POST", "/v1/completions", JSON, "Content-Length: -1"), 400),
        (head("GET", "/health", "A : b"), 400),
        (head("GET", "/health", "A: b\r\n c"), 400),
        (b"GET /health HTTP/1.1\nHost: a\n\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"CONNECT server:1 HTTP/1.1\r\n\r\n", 400),
        (b"BREW / HTTP/1.1\r\n\r\n", 400),
    ],
    ids=lambda value: str(value[:60])[2:-1] if isinstance(value, bytes) else "",
)
def test_what_is_no_request_is_refused_and_the_connection_closed(plain: WireServer, sent: bytes, code: int) -> None:
    refusal(plain.talk(sent), code)


def test_a_head_within_the_bounds_is_taken(plain: WireServer) -> None:
    """The control."""
    lines = [CLOSE, *(f"A{index}: {'a' * 500}" for index in range(120))]
    assert status(plain.talk(head("GET", "/health?" + "a" * 8000, *lines))) == 200
    refusal(plain.talk(head("GET", "/health", *lines, *lines)), 431)


def test_bounds_of_a_head_can_be_set(serve: Serve) -> None:
    wire = serve(max_header_bytes=1024, max_header_count=16)
    assert "--h11-max-header-count" in refusal(wire.talk(head("GET", "/health", *["A: a"] * 16)), 431)
    message = refusal(wire.talk(head("GET", "/health", "A: " + "a" * 1024)), 431)
    assert "--h11-max-incomplete-event-size" in message


def test_a_fault_after_a_request_ends_the_connection_after_its_answer(plain: WireServer) -> None:
    """Two answers are never mixed."""
    answer = plain.talk(COMPLETION + BODY + b"nonsense\r\n\r\n")
    assert status(answer) == 200
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"}")
    assert b"abcd" in answer


def test_requests_that_come_together_are_answered_in_turn(plain: WireServer) -> None:
    answer = plain.talk((COMPLETION + BODY) * 3 + HEALTH)
    assert answer.count(b"HTTP/1.1 200") == 4
    assert answer.endswith(b'{"status":"ok"}')


def test_no_more_than_a_few_requests_may_come_together(plain: WireServer) -> None:
    answer = plain.talk((COMPLETION + BODY) * 5000)
    assert answer.count(b"HTTP/1.1") == 1


def test_a_connection_can_be_used_again_after_an_error(plain: WireServer) -> None:
    with plain.connect() as client:
        for sent in (head("GET", "/nowhere"), head("GET", "/v1/completions")):
            client.sendall(sent)
            assert status(client.recv(4096)) in (404, 405)
        client.sendall(COMPLETION + BODY)
        assert status(client.recv(4096)) == 200


def test_trailers_are_no_headers() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        seen.extend(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    wire = WireServer(app)
    wire.talk(head("POST", "/", CLOSE, "Transfer-Encoding: chunked"), b"1\r\nx\r\n0\r\nAuthorization: me\r\n\r\n")
    wire.stop()
    assert seen == [b"host", b"connection", b"transfer-encoding"]


def test_an_offer_of_another_protocol_does_not_lose_the_body(plain: WireServer) -> None:
    """Clients of Java offer HTTP/2 with their first request."""
    lines = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAA", JSON]
    offer = head("POST", "/v1/completions", *lines, f"Content-Length: {len(BODY)}")
    answer = plain.talk(offer + BODY + HEALTH)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert b"abcd" in answer


def test_who_waits_to_be_asked_for_the_body_is_asked_or_refused(serve: Serve) -> None:
    wire = serve(max_body_bytes=1000)
    ask = head("POST", "/v1/completions", JSON, "Expect: 100-continue", f"Content-Length: {len(BODY)}")
    with wire.connect() as client:
        client.sendall(ask)
        assert client.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        assert b"abcd" in receive_all(client)
    too_large = head("POST", "/nowhere", JSON, "Expect: 100-continue", "Content-Length: 2000")
    assert status(wire.talk(too_large)) == 404


# ---- large senders ---------------------------------------------------------------------------------------------------


def post_then_read(wire: WireServer, path: str, num_bytes: int) -> tuple[int, str | None]:
    """As many clients do: all is sent before anything is read. Status and ``connection`` of what they see then."""
    connection = http.client.HTTPConnection(*wire.address, timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", path, bytes(num_bytes), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert json.loads(answer.read())["error"]["code"] == answer.status
        return answer.status, answer.getheader("connection")


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/v1/completions", (413, "close")),
        ("/tokenize", (413, "close")),
        ("/nowhere", (404, None)),
        ("/health", (405, None)),
    ],
)
def test_who_sends_all_before_reading_sees_the_refusal(plain: WireServer, path: str, seen: Any) -> None:
    assert post_then_read(plain, path, 40 * MILLION) == seen


def test_and_sees_that_there_are_too_many_connections(serve: Serve) -> None:
    wire = serve(max_connections=1)
    with wire.connect():
        assert wait_until(lambda: wire.num_connections == 1)
        assert post_then_read(wire, "/v1/completions", 40 * MILLION) == (503, "close")


def test_without_throwing_away_what_comes_it_does_not(plain: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(body_refusal, "_BYTES", MILLION)
    with pytest.raises(ConnectionError):
        post_then_read(plain, "/v1/completions", 40 * MILLION)


@pytest.mark.parametrize("framing", ["Content-Length: 10000000000", "Transfer-Encoding: chunked"])
def test_a_body_of_gigabytes_is_cut_off(plain: WireServer, framing: str) -> None:
    chunked = framing.startswith("T")
    part = b"%x\r\n" % MILLION * chunked + bytes(MILLION) + b"\r\n" * chunked
    before, taken = resident_bytes(), 0
    with plain.connect() as client, contextlib.suppress(ConnectionError):
        client.sendall(head("POST", "/v1/completions", JSON, framing))
        while taken < 10_000_000_000:
            client.sendall(part)
            taken += len(part)
    assert taken < 300_000_000
    assert resident_bytes() - before < 50_000_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- slow senders ----------------------------------------------------------------------------------------------------


def test_a_connection_without_a_request_is_closed(serve: Serve) -> None:
    assert serve(request_header_timeout=0.2).talk() == b""


@pytest.mark.parametrize("sent", [b"G", b"GET /health HTTP/1.1\r\nA: b", b"\r\n"])
def test_headers_that_never_end_are_refused(serve: Serve, sent: bytes) -> None:
    wire = serve(request_header_timeout=0.2)
    assert "--request-header-timeout" in refusal(wire.talk(sent), 408)
    assert wire.refused == [408]  # counted


@pytest.mark.parametrize("first", [b"", HEALTH.replace(b"close", b"keep-alive")], ids=["first", "second"])
def test_headers_that_come_byte_by_byte_are_refused(serve: Serve, first: bytes) -> None:
    wire = serve(request_header_timeout=0.5)
    with wire.connect() as client:
        client.sendall(first)
        if first:
            assert status(client.recv(4096)) == 200
        client.settimeout(0.05)
        answer = b""
        for byte in b"GET / HTTP/1.1\r\n" + b"A: a\r\n" * 100:
            client.sendall(bytes([byte]))
            try:
                answer = client.recv(4096)
                break
            except TimeoutError:
                continue
        refusal(answer, 408)


@pytest.mark.parametrize("framing", ["Content-Length: 10000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_that_never_ends_is_refused(serve: Serve, path: str, framing: str) -> None:
    wire = serve(request_body_timeout=0.2)
    assert "--request-body-timeout" in refusal(wire.talk(head("POST", path, JSON, framing), b"3\r\n{ "), 408)


def test_a_body_that_comes_fast_enough_may_take_longer(serve: Serve) -> None:
    """The control: 16 KiB a second, and something for a start."""
    received = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal received
        more = True
        while more:
            message = await receive()
            received += len(message["body"])
            more = message["more_body"]
        await large_answer(scope, receive, send)

    wire = serve(app, request_body_timeout=10.0)
    ten_seconds = bytes(160 * 1024)
    with wire.connect() as client:
        client.sendall(head("POST", "/", CLOSE, f"Content-Length: {6 * len(ten_seconds)}"))
        for number in range(1, 6):
            client.sendall(ten_seconds)
            assert wait_until(lambda number=number: received == number * len(ten_seconds))
            wire.after(11)
        client.sendall(ten_seconds)
        assert status(receive_all(client)) == 200


def test_a_body_that_was_not_asked_for_does_not_hold_the_connection(plain: WireServer) -> None:
    with plain.connect() as client:
        client.sendall(head("POST", "/nowhere", JSON, "Content-Length: 1000000"))
        assert status(client.recv(4096)) == 404
        assert plain.num_connections == 1
        plain.after(5)
        assert client.recv(1) == b""


def test_a_connection_that_is_not_used_again_is_closed(serve: Serve) -> None:
    wire = serve(keep_alive_timeout=0.2)
    answer = wire.talk(COMPLETION + BODY)
    assert status(answer) == 200
    assert b"connection: close" not in answer.lower()


def test_a_thousand_slow_senders_harm_nobody(serve: Serve, server: Any) -> None:
    wire = serve(request_header_timeout=500.0, request_body_timeout=500.0)
    assert status(wire.talk(COMPLETION.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + BODY)) == 200
    files = len(os.listdir("/proc/self/fd"))
    slow = [wire.connect() for _ in range(1000)]
    for index, client in enumerate(slow):
        client.sendall(COMPLETION[:30] if index % 2 else COMPLETION + BODY[:10])
    assert wait_until(lambda: wire.num_connections == 1000)
    took = []
    for _ in range(20):
        began = time.monotonic()
        assert httpx.post(wire.url + "/v1/completions", json=json.loads(BODY)).status_code == 200
        took.append(time.monotonic() - began)
    assert sorted(took)[10] < 0.5
    wire.after(501)
    refused = [receive_all(client) for client in slow]
    assert {status(answer) for answer in refused} == {408}
    for client in slow:
        client.close()
    assert wait_until(lambda: wire.num_connections == 0)
    assert len(os.listdir("/proc/self/fd")) <= files
    assert len(server.engine.started) == 21


def test_a_thousand_connections_that_are_reset_leave_nothing(serve: Serve) -> None:
    wire = serve()
    assert status(wire.talk(HEALTH)) == 200
    files = len(os.listdir("/proc/self/fd"))
    for index in range(1000):
        client = wire.connect()
        client.sendall(b"" if index % 2 else COMPLETION + BODY)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    assert wait_until(lambda: wire.num_connections == 0)
    assert len(os.listdir("/proc/self/fd")) <= files


def test_beyond_the_most_connections_only_probes_are_answered(serve: Serve, server: Any) -> None:
    wire = serve(max_connections=3)
    held = [wire.connect() for _ in range(3)]
    assert wait_until(lambda: wire.num_connections == 3)
    assert "--max-connections" in refusal(wire.talk(COMPLETION + BODY), 503)
    assert status(wire.talk(head("GET", "/health"))) == 200
    assert server.engine.started == []
    for client in held:
        client.close()
    assert wait_until(lambda: wire.num_connections == 0)
    assert status(wire.talk(COMPLETION.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + BODY)) == 200


# ---- slow readers ----------------------------------------------------------------------------------------------------


async def large_answer(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"%d" % (LARGE if scope["path"] == "/large" else 0))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(LARGE) if scope["path"] == "/large" else b""})


def test_an_answer_that_is_not_read_is_given_up(serve: Serve) -> None:
    wire = serve(large_answer, write_timeout=100.0)
    with wire.connect(receive_buffer=65536) as client:
        client.sendall(head("GET", "/large"))
        assert wait_until(lambda: wire.unsent > 10_000_000)
        # Once is enough, unless the system has taken a little more meanwhile.
        assert wait_until(lambda: wire.after(101) or wire.num_connections == 0)
        assert wire.refused == [499]
        assert len(receive_all(client)) < LARGE


def test_an_answer_that_is_read_slowly_is_whole(serve: Serve) -> None:
    """The control: it takes longer than a client may stand still."""
    wire = serve(large_answer, write_timeout=100.0)
    with wire.connect(receive_buffer=65536) as client:
        client.sendall(head("GET", "/large", CLOSE))
        assert wait_until(lambda: wire.unsent > 10_000_000)
        size = 0
        for _ in range(5):
            wire.after(60)
            before = wire.unsent
            while wire.unsent == before:
                size += len(client.recv(1 << 16))
        size += len(receive_all(client))
        assert size > LARGE


def test_streams_that_are_not_read_are_bounded_and_given_up(serve: Serve, server: Any) -> None:
    """Two hundred of them, of more text than all buffers hold, beside one that is read."""
    server.engine.lengthen(10**9)
    asked = {"model": "m", "prompt": "hi", "temperature": 0, "stream": True}
    wire = serve(write_timeout=1000.0)
    stuck = []
    for _ in range(200):
        client = wire.connect(receive_buffer=4096)
        body = json.dumps(asked | {"max_tokens": 10**8}).encode()
        client.sendall(head("POST", "/v1/completions", JSON, f"Content-Length: {len(body)}") + body)
        stuck.append(client)
    assert wait_until(lambda: len(server.engine.started) == 200, 30)
    answer = httpx.post(wire.url + "/v1/completions", json=asked | {"max_tokens": 100}, timeout=60)
    assert answer.text.count('"text":"') == 100
    assert answer.text.endswith("data: [DONE]\n\n")
    assert server.engine.aborted == []
    assert wire.unsent < 100_000
    assert wait_until(lambda: wire.after(1001) or len(server.engine.aborted) == 200, 30)
    assert wait_until(lambda: wire.num_connections == 0)
    for client in stuck:
        client.close()


def test_hosts_that_have_vanished_are_noticed(serve: Serve) -> None:
    """By the system: nothing comes of them, not even that they are gone."""
    wire = serve(write_timeout=7.5)
    with wire.connect():
        assert wait_until(lambda: wire.num_connections == 1)
        assert wire.option(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == {1}
        assert wire.option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == {7500}
        assert wire.option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == {30}


def test_the_sweep_is_what_ends_them(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control of this file: without it nothing is ended."""
    monkeypatch.setattr(HttpProtocol, "check", lambda *_: None)
    wire = serve(request_header_timeout=0.1)
    with wire.connect() as client:
        client.settimeout(1.5)
        with pytest.raises(TimeoutError):
            client.recv(1)
