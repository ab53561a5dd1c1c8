"""The HTTP server's series: those that prometheus-fastapi-instrumentator gives vLLM's, under the same names and labels,
and what an operator asks beyond them: exact statuses, and clients that left."""

from collections.abc import Iterable
from http import HTTPStatus

from prometheus_client import CollectorRegistry, generate_latest

from octavo.metrics import buckets
from octavo.metrics.table import MetricsFolder, MetricTable

__all__ = ["NO_HANDLER", "HttpMetrics"]

# Label of requests to paths that no route has.
NO_HANDLER = "none"

_OTHER = "other"
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", _OTHER)
_CLIENT_CLOSED_REQUEST = "499"
_CODES = (*(str(status.value) for status in HTTPStatus if status >= HTTPStatus.OK), _CLIENT_CLOSED_REQUEST, _OTHER)
# What the HTTP server itself may say, before or beside the app.
_REFUSALS = ("400", "408", "413", "431", "499", "503", _OTHER)
_KINDS = ("2xx", "3xx", "4xx", "5xx", _OTHER)


class HttpMetrics:
    """Counts the requests of one front end.

    Args:
        handlers: the routes' paths.
        folder: see EngineMetrics.
    """

    def __init__(self, handlers: Iterable[str], folder: MetricsFolder | None = None) -> None:
        self._table = table = MetricTable(folder, "http-metrics")
        names = sorted({*handlers, NO_HANDLER})
        self._requests = {
            (handler, method, kind): table.counter(
                "http_requests",
                "Answered requests, by the first digit of the status.",
                {"method": method, "status": kind, "handler": handler},
                only_seen=True,
            )
            for handler in names
            for method in _METHODS
            for kind in _KINDS
        }
        self._seconds_by_handler = {
            (handler, method): table.histogram(
                "http_request_duration_seconds",
                "From a request's head to the end of its answer, by path.",
                {"method": method, "handler": handler},
                buckets.HTTP_SECONDS_BY_HANDLER,
                only_seen=True,
            )
            for handler in names
            for method in _METHODS
        }
        self._seconds = table.histogram(
            "http_request_duration_highr_seconds",
            "From a request's head to the end of its answer.",
            {},
            buckets.HTTP_SECONDS,
        )
        self._request_bytes, self._response_bytes = (
            {handler: table.summary(name, text, {"handler": handler}, only_seen=True) for handler in names}
            for name, text in (
                ("http_request_size_bytes", "Content-Length of requests; 0 where there is none."),
                ("http_response_size_bytes", "Content-Length of answers; 0 where there is none, as in streams."),
            )
        )
        self._codes = {
            code: table.counter("octavo:http_responses", "Answers, by their status.", {"code": code}, only_seen=True)
            for code in _CODES
        }
        self._disconnects = table.counter(
            "octavo:http_client_disconnects", "Requests whose client left before the end of the answer.", {}
        )
        self._refusals = {
            code: table.counter(
                "octavo:http_connections_refused", "Connections that were closed on the server's side.", {"code": code}
            )
            for code in _REFUSALS
        }
        table.seal()
        self._registry = CollectorRegistry()
        self._registry.register(table)

    def on_answered(
        self, handler: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """A request has had its answer, or all of it that its client would take.

        Args:
            handler: one of the routes' paths, or NO_HANDLER.
        """
        method = method if method in _METHODS else _OTHER
        kind = f"{status // 100}xx"
        code = str(status)
        self._requests[handler, method, kind if kind in _KINDS else _OTHER].inc()
        self._codes[code if code in self._codes else _OTHER].inc()
        self._seconds_by_handler[handler, method].observe(seconds)
        self._seconds.observe(seconds)
        self._request_bytes[handler].observe(request_bytes)
        self._response_bytes[handler].observe(response_bytes)

    def on_disconnect(self) -> None:
        """A client has left before the end of its answer."""
        self._disconnects.inc()

    def on_refused(self, status: int) -> None:
        """The HTTP server has closed a connection for this reason: too many, too slow, or no HTTP."""
        code = str(status)
        self._refusals[code if code in self._refusals else _OTHER].inc()

    def render(self) -> bytes:
        """All series in the text format."""
        return generate_latest(self._registry)
