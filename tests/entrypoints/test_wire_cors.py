"""Pages in browsers can read what is refused before any app has seen it, as they can read all other answers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.config import AccessConfig
from tests.entrypoints.wire import WireServer, head, receive_all

PAGE, OTHER_PAGE = "https://page.example", "https://other.example"
JSON = "Content-Type: application/json"
HEADERS = [f"A{index}: a" for index in range(300)]

Serve = Callable[..., WireServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    running = []

    def start(*origins: str, **limits: Any) -> WireServer:
        access = AccessConfig(allowed_origins=list(origins))
        running.append(WireServer(app, access=access, **limits))
        return running[-1]

    yield start
    for wire in running:
        wire.stop()


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads its body, and answers without the layers that octavo's own app has around it."""
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def headers_of(answer: bytes, status: int) -> dict[str, str]:
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}


def origin(page: str) -> str:
    return f"Origin: {page}"


FAULTS = [
    (431, lambda page: head("GET", "/health", origin(page), *HEADERS)),
    (431, lambda page: head("GET", "/health", origin(page), "A: " + "a" * 100_000)),
    (400, lambda page: head("POST", "/x", origin(page), "Content-Length: -1")),
    (408, lambda page: head("POST", "/x", origin(page), JSON, "Content-Length: 3")),  # no body comes
    (408, lambda page: head("POST", "/x", origin(page), JSON)[:-2]),  # its head has no end
]


@pytest.mark.parametrize(("status", "request_of"), FAULTS)
def test_refusals_can_be_read_by_the_pages_that_are_named(
    serve: Serve, status: int, request_of: Callable[[str], bytes]
) -> None:
    wire = serve(PAGE, "https://third.example", request_header_timeout=0.2, request_body_timeout=0.2)
    told = headers_of(wire.talk(request_of(PAGE)), status)
    assert told["access-control-allow-origin"] == PAGE
    assert told["vary"] == "Origin"
    assert "retry-after" in told["access-control-expose-headers"]
    assert "access-control-allow-origin" not in headers_of(wire.talk(request_of(OTHER_PAGE)), status)


@pytest.mark.parametrize(("status", "request_of"), FAULTS)
def test_by_all_where_all_may_and_by_none_where_that_is_not_stated(
    serve: Serve, status: int, request_of: Callable[[str], bytes]
) -> None:
    limits = {"request_header_timeout": 0.2, "request_body_timeout": 0.2}
    assert headers_of(serve("*", **limits).talk(request_of(PAGE)), status)["access-control-allow-origin"] == "*"
    told = headers_of(serve(**limits).talk(request_of(PAGE)), status)
    assert not any(name.startswith("access-control") for name in told)


def test_where_the_origin_has_not_come_yet_it_is_the_only_one_that_may(serve: Serve) -> None:
    too_much = head("GET", "/" + "a" * 9000, origin(PAGE))
    assert headers_of(serve(PAGE).talk(too_much), 414)["access-control-allow-origin"] == PAGE
    assert "access-control-allow-origin" not in headers_of(serve(PAGE, OTHER_PAGE).talk(too_much), 414)


def test_too_many_connections_can_be_read_too(serve: Serve) -> None:
    wire = serve(PAGE, max_connections=1)
    with wire.connect() as held:
        held.sendall(head("GET", "/"))
        assert held.recv(4096).startswith(b"HTTP/1.1 200 ")
        told = headers_of(wire.talk(head("GET", "/", origin(PAGE))), 503)
        assert told["access-control-allow-origin"] == PAGE
    with wire.connect() as client:
        client.sendall(head("GET", "/", origin(PAGE), "Connection: close"))
        receive_all(client)
