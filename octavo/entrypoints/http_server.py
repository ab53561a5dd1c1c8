"""The HTTP server under the app: uvicorn with octavo's settings, in one place for every process that listens."""

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from octavo.config import LimitsConfig, ServerConfig
from octavo.entrypoints.access import refusal_headers
from octavo.entrypoints.access_log import AccessLog
from octavo.entrypoints.forwarded import believe_proxies
from octavo.entrypoints.http_protocol import HttpProtocol
from octavo.entrypoints.stream_parts import StreamParts
from octavo.entrypoints.tls import Tls
from octavo.errors import ConfigError
from octavo.logging import init_logger

__all__ = ["HttpServer"]

logger = init_logger(__name__)

# When uvicorn cancels whatever is left, with a traceback for each. It should find nothing.
_LAST_RESORT_SECONDS = 3
_TICKS_A_SWEEP = 5  # of 0.1 s
_TICKS_A_REFRESH = 20
_TLS_GOODBYE_SECONDS = 2.0

# Files that a front end has open beside its connections, with those that are only answered when they are probes.
_RESERVED_FILES = 128
_LEAST_CONNECTIONS = 16

# A host that has vanished says nothing: it is asked, in silence after so many seconds, so often.
_KEEPALIVE_SECONDS = 30
_KEEPALIVE_PROBES = 3
# Of what is written to a client that does not read, the system takes little more than this; the rest is seen here.
_MOST_UNSENT_BYTES = 32 * 1024


class HttpServer(uvicorn.Server):
    """Serves an app on sockets (``serve(sockets=…)``) until ``should_exit`` is set. Signals are its owner's matter.

    Args:
        app: an ASGI app.
        config: the server's settings.
        on_refused: told the status of each connection that is closed from here.

    Raises:
        ConfigError: this process may open too few files, the certificates cannot be used, or what is to be believed is
            no address.
    """

    def __init__(self, app: Any, config: ServerConfig, on_refused: Callable[[int], None]) -> None:
        _log_like_octavo(logging.getLogger("uvicorn"))
        self._limits = config.limits
        self._count_refused = on_refused
        self._tls = Tls(config.http)
        self._refreshes_tls = config.http.enable_ssl_refresh
        super().__init__(
            uvicorn.Config(
                StreamParts(believe_proxies(AccessLog(app, config.logs), config.access.forwarded_allow_ips)),
                log_config=None,
                log_level=config.logs.uvicorn_log_level,
                access_log=False,
                http=functools.partial(  # type: ignore[arg-type]
                    HttpProtocol,
                    limits=config.limits,
                    max_connections=_max_connections(config.limits),
                    on_refused=self._on_refused,
                    refusal_headers=refusal_headers(config.access),
                ),
                ws="none",
                lifespan="off",
                proxy_headers=False,  # uvicorn's default believes whoever is on this machine
                server_header=False,
                timeout_graceful_shutdown=_LAST_RESORT_SECONDS,
            )
        )

    def _on_refused(self, client: tuple[str, int] | None, status: int, message: str) -> None:
        self._count_refused(status)
        address = f"{client[0]}:{client[1]}" if client else "-"
        fields = {"client": address, "status": status}
        logger.info("connection of %s ended: %d %s", address, status, message, extra={"fields": fields})

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for sock in sockets or []:
            _notice_vanished_hosts(sock, self._limits.write_timeout)
        if self._tls.context is None:
            await super().startup(sockets)
        else:
            await self._start_tls(sockets or [], self._tls.context)

    async def _start_tls(self, sockets: list[socket.socket], context: ssl.SSLContext) -> None:
        """As uvicorn does, but a client has no more time for its handshake than for a request's head."""
        protocol: Any = self.config.http_protocol_class
        make_protocol = functools.partial(
            protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        loop, seconds = asyncio.get_running_loop(), self._limits.request_header_timeout
        self.servers = [
            await loop.create_server(
                make_protocol,
                sock=sock,
                ssl=context,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=_TLS_GOODBYE_SECONDS,
                backlog=self.config.backlog,
            )
            for sock in sockets
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if self._refreshes_tls and counter % _TICKS_A_REFRESH == 0:
            self._tls.refresh()
        if counter % _TICKS_A_SWEEP == 0:
            self.sweep()
        return await super().on_tick(counter)

    def sweep(self) -> None:
        """Ends what has taken too long, on any connection."""
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpProtocol):
                connection.check(now)

    def abort_connections(self) -> None:
        """Closes all connections at once, whatever is still to be written to them."""
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def _max_connections(limits: LimitsConfig) -> int:
    """As many as are allowed, if there can be so many open files. Raises what this process may have, if it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return limits.max_connections
    if soft < _RESERVED_FILES + _LEAST_CONNECTIONS:
        raise ConfigError(
            f"the server may open only {soft} files (ulimit -n), but needs {_RESERVED_FILES + _LEAST_CONNECTIONS} at "
            "least; raise the limit"
        )
    return min(limits.max_connections, soft - _RESERVED_FILES)


def _notice_vanished_hosts(sock: socket.socket, write_timeout: float) -> None:
    """Options of a listening socket, which the connections that it accepts have too."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    options = {
        "TCP_KEEPIDLE": _KEEPALIVE_SECONDS,
        "TCP_KEEPINTVL": _KEEPALIVE_SECONDS // _KEEPALIVE_PROBES,
        "TCP_KEEPCNT": _KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": int(write_timeout * 1000),
        "TCP_NOTSENT_LOWAT": _MOST_UNSENT_BYTES,
    }
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _log_like_octavo(uvicorn_logger: logging.Logger) -> None:
    """The same lines on the same stream."""
    uvicorn_logger.handlers = list(logging.getLogger("octavo").handlers)
    uvicorn_logger.propagate = False
    logging.getLogger("uvicorn.error").addFilter(_in_our_words)


def _in_our_words(record: logging.LogRecord) -> bool:
    """uvicorn's logger for everything but requests has a name that would make every line look like trouble. And that it
    has "started" and "finished" reads like success where the model cannot be loaded."""
    record.name = "uvicorn"
    return not str(record.msg).startswith(("Started server process", "Finished server process"))
