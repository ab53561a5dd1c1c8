"""The server's socket."""

import contextlib
import socket

import pytest

from octavo.entrypoints.listen import listen, url_of
from octavo.errors import ConfigError


def test_port_0_finds_a_port_and_listens_at_once() -> None:
    (sock,) = listen("127.0.0.1", 0)
    with sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_a_port_in_use_is_named() -> None:
    (sock,) = listen("127.0.0.1", 0)
    with sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use.*--port"):
            listen("127.0.0.1", port)
    (sock,) = listen("127.0.0.1", port)  # control: free again
    sock.close()


def test_connections_are_spread_over_the_sockets_that_listen_and_the_port_is_still_in_use_for_others() -> None:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(sock) for sock in listen("127.0.0.1", 0, 3)]
        port = sockets[0].getsockname()[1]

        for sock in sockets[1:]:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
        sockets[1].listen(128)
        spread = _num_accepted(sockets[:2], port)
        assert sum(spread) == 96
        assert min(spread) > 10
        with pytest.raises(ConfigError, match="is in use"):
            listen("127.0.0.1", port, 3)


def _num_accepted(sockets: list[socket.socket], port: int) -> list[int]:
    """Of 96 connections, by socket."""
    clients = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(96)]
    found = []
    for sock in sockets:
        found.append(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.accept()[0].close()
                found[-1] += 1
    for client in clients:
        client.close()
    return found


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1", "x" * 300])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        listen(host, 0)
