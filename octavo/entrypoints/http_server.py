"""The HTTP server under the app: uvicorn with octavo's settings, in one place for every process that listens."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import uvicorn

from octavo.config import ServerConfig

__all__ = ["HttpServer"]

# When uvicorn cancels whatever is left, with a traceback for each. It should find nothing.
_LAST_RESORT_SECONDS = 3


class HttpServer(uvicorn.Server):
    """Serves an app on sockets (``serve(sockets=…)``) until ``should_exit`` is set. Signals are its owner's matter.

    Args:
        app: an ASGI app.
        config: the server's settings.
    """

    def __init__(self, app: Any, config: ServerConfig) -> None:
        _log_like_octavo(logging.getLogger("uvicorn"))
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level=config.logs.uvicorn_log_level,
                access_log=not config.logs.disable_uvicorn_access_log,
                http="httptools",
                ws="none",
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=_LAST_RESORT_SECONDS,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def abort_connections(self) -> None:
        """Closes all connections at once, whatever is still to be written to them."""
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def _log_like_octavo(uvicorn_logger: logging.Logger) -> None:
    """The same lines on the same stream."""
    uvicorn_logger.handlers = list(logging.getLogger("octavo").handlers)
    uvicorn_logger.propagate = False
    # uvicorn's logger for everything but requests has a name that would make every line look like trouble.
    logging.getLogger("uvicorn.error").addFilter(_rename)


def _rename(record: logging.LogRecord) -> bool:
    record.name = "uvicorn"
    return True
