"""Binds the server's sockets, before anything that takes time: a port that is taken ends the start at once."""

import contextlib
import errno
import socket
from collections.abc import Iterator
from pathlib import Path

from octavo.config import HttpConfig
from octavo.engine import note_socket, remove_noted_socket
from octavo.entrypoints.unix_socket import listen_on_path
from octavo.errors import ConfigError

__all__ = ["listen", "listening", "url_of"]

_BACKLOG = 2048


@contextlib.contextmanager
def listening(config: HttpConfig, folder: Path | None) -> Iterator[list[socket.socket]]:
    """A socket for each front end, where ``config`` says. Closed after the block; a Unix socket is removed, too.

    Args:
        folder: the server's private one, if it has one.

    Raises:
        ConfigError
    """
    if config.uds is None:
        sockets, note = listen(config.host, config.port, config.api_server_count), None
    else:
        for name in ("host", "port"):
            if getattr(config, name) != getattr(HttpConfig, name):
                raise ConfigError(f"--{name} has no effect with --uds, which takes its place; state one of them")
        sockets = listen_on_path(Path(config.uds), config.api_server_count, _BACKLOG)
        note = note_socket(Path(config.uds), folder)
    try:
        yield sockets
    finally:
        for sock in sockets:
            sock.close()
        if note is not None:
            remove_noted_socket(note)


def listen(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Sockets bound to ``host`` and ``port`` (0: one that is free), among which the system spreads new connections. The
    first one listens; each of the others gets its share when it does, too.

    Raises:
        ConfigError: there is no such host, or the port cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host!r} is not an address of this machine: {_reason(error)}") from None
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(sock := socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setblocking(False)
            if len(sockets) > 1:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                sock.bind(sockets[0].getsockname())
                continue
            sock.bind(address)
            if count > 1:  # not before: it is to be the only one so far, or else the port is in use
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sockets[0].listen(_BACKLOG)
    except OSError as error:
        for sock in sockets:
            sock.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; stop what uses it, or choose another with --port"
        else:
            message = f"cannot listen on {host} port {port}: {_reason(error)}; see --host and --port"
        raise ConfigError(message) from None
    return sockets


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """The server's address as clients write it."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
