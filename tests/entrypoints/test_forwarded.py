"""Behind a proxy the access log shows the proxy's clients, where the operator believes the proxy; nobody else can claim
to be another.
"""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.config import AccessConfig, ServerConfig
from octavo.entrypoints import HttpServer
from octavo.errors import ConfigError
from tests.entrypoints.wire import WireServer, head


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.clients: list[str] = []

    def emit(self, record: Any) -> None:
        self.clients.append(record.fields["client"])


@pytest.fixture
def logged() -> Iterator[Kept]:
    kept = Kept()
    logging.getLogger("octavo.access").addHandler(kept)
    yield kept
    logging.getLogger("octavo.access").removeHandler(kept)


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def client_of(logged: Kept, believed: list[str], *headers: str) -> str:
    server = WireServer(app, access=AccessConfig(forwarded_allow_ips=believed))
    try:
        assert server.talk(head("GET", "/", "Connection: close", *headers)).startswith(b"HTTP/1.1 200 ")
    finally:
        server.stop()
    return logged.clients.pop()


FORGED = "X-Forwarded-For: 9.9.9.9"


@pytest.mark.parametrize(
    ("believed", "headers", "client"),
    [
        (["127.0.0.1"], [FORGED], "9.9.9.9"),
        (["10.0.0.1, 127.0.0.0/8"], [FORGED], "9.9.9.9"),
        (["::1", "*"], [FORGED], "9.9.9.9"),
        (["127.0.0.1"], ["X-Forwarded-For: 9.9.9.9, 2001:db8::7"], "2001:db8::7"),  # what the proxy has added
        (["127.0.0.1", "10.0.0.0/8"], ["X-Forwarded-For: 9.9.9.9, 8.8.8.8, 10.2.3.4"], "8.8.8.8"),  # a proxy before it
        (["127.0.0.1"], ["X-Forwarded-For: 9.9.9.9:4444"], "9.9.9.9:4444"),
        (["127.0.0.1"], ['X-Forwarded-For: 1.2.3.4" 200 forged=1'], "unknown"),
        (["127.0.0.1"], ["X-Forwarded-For: " + "x" * 5000], "unknown"),
    ],
)
def test_the_client_is_whom_a_believed_proxy_names(
    logged: Kept, believed: list[str], headers: list[str], client: str
) -> None:
    assert client_of(logged, believed, *headers) == client


@pytest.mark.parametrize("believed", [[], ["10.0.0.1"], ["127.0.0.2"]])
def test_nobody_else_is_believed_not_even_on_this_machine(
    logged: Kept, monkeypatch: pytest.MonkeyPatch, believed: list[str]
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's; octavo has a flag
    assert client_of(logged, believed, FORGED).startswith("127.0.0.1:")


def test_without_the_header_it_is_the_proxy(logged: Kept) -> None:
    assert client_of(logged, ["127.0.0.1"]).startswith("127.0.0.1:")


@pytest.mark.parametrize("wrong", ["localhost", "10.0.0.1/8", "10.0.0", "all"])
def test_what_is_no_address_is_refused(wrong: str) -> None:
    config = ServerConfig(access=AccessConfig(forwarded_allow_ips=["10.0.0.1", wrong]))
    with pytest.raises(ConfigError, match=f"--forwarded-allow-ips '{wrong}': an address"):
        HttpServer(app, config, lambda status: None)
