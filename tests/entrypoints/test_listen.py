"""The server's socket."""

import contextlib
import socket

import pytest

from octavo.entrypoints.listen import listen, url_of
from octavo.errors import ConfigError


def test_port_0_finds_a_port_and_listens_at_once() -> None:
    with contextlib.closing(listen("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_a_port_in_use_is_named() -> None:
    with contextlib.closing(listen("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use.*--port"):
            listen("127.0.0.1", port)
    listen("127.0.0.1", port).close()  # control: free again


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1", "x" * 300])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        listen(host, 0)
