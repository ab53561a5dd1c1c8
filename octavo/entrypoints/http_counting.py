"""Counts HTTP requests, as the outermost layer of the app: also those that other layers refuse."""

import time
from collections.abc import Awaitable, Iterable

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.metrics import NO_HANDLER, HttpMetrics

__all__ = ["HttpCounting", "route_paths"]

# Asked for all the time by those who watch; vLLM leaves such paths out, too.
_NOT_COUNTED = frozenset(("/health", "/live", "/ready", "/metrics", "/version"))
_INTERNAL_SERVER_ERROR = 500


def route_paths(routes: Iterable[BaseRoute]) -> dict[str, Route]:
    """The routes that are counted, by path."""
    return {route.path: route for route in routes if isinstance(route, Route) and route.path not in _NOT_COUNTED}


class HttpCounting:
    """ASGI middleware.

    Args:
        routes: from ``route_paths``.
        metrics: has these as handlers.
        root_path: may stand before the paths.
    """

    def __init__(self, app: ASGIApp, routes: dict[str, Route], metrics: HttpMetrics, root_path: str = "") -> None:
        self._app = app
        self._routes = routes
        self._metrics = metrics
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(self._root_path)
        if scope["type"] != "http" or path in _NOT_COUNTED:
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status, response_bytes, complete, left = _INTERNAL_SERVER_ERROR, 0, False, False

        def send_seen(message: Message) -> Awaitable[None]:  # not async: it is called for every token of a stream
            nonlocal status, response_bytes, complete
            if message["type"] == "http.response.start":
                status, response_bytes = message["status"], _content_length(message.get("headers", ()))
            elif not message.get("more_body"):
                complete = True
            return send(message)

        async def receive_seen() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.disconnect" and not complete:
                left = True
            return message

        try:
            await self._app(scope, receive_seen, send_seen)
        finally:
            if left:
                self._metrics.on_disconnect()
            self._metrics.on_answered(
                self._handler(path),
                scope["method"],
                status,
                time.monotonic() - started,
                _content_length(scope["headers"]),
                response_bytes,
            )

    def on_refused(self, status: int) -> None:
        """For the HTTP server, which closes connections without asking any app."""
        self._metrics.on_refused(status)

    def _handler(self, path: str) -> str:
        if path in self._routes:
            return path
        return next((name for name, route in self._routes.items() if route.path_regex.match(path)), NO_HANDLER)


def _content_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    for name, value in headers:
        if name.lower() == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0
