"""Binds the server's socket, before anything that takes time: a port that is taken ends the start at once."""

import errno
import socket

from octavo.errors import ConfigError

__all__ = ["listen", "url_of"]

_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host`` and ``port`` (0: one that is free).

    Raises:
        ConfigError: there is no such host, or the port cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host!r} is not an address of this machine: {_reason(error)}") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; stop what uses it, or choose another with --port"
        else:
            message = f"cannot listen on {host} port {port}: {_reason(error)}; see --host and --port"
        raise ConfigError(message) from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """The server's address as clients write it."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
