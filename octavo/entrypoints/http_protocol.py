"""One connection: uvicorn's HTTP/1.1 over httptools, with bounds on what a client may send and on how long it may take.

Every part of a request has a deadline, and an answer that nobody reads has one too. One sweep over all connections
looks at them (``check``), not timers. What is refused here never reaches the app; it is answered in the shape that all
errors have, and the connection is closed.
"""

import enum
import math
from collections.abc import Callable
from typing import Any

import httptools
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from octavo.config import LimitsConfig
from octavo.entrypoints.access import RawHeaders
from octavo.entrypoints.body_refusal import LINGER_SECONDS, BodyRefusal
from octavo.entrypoints.errors import UnavailableError, error_response
from octavo.entrypoints.whole_answers import WholeAnswers

__all__ = ["HttpProtocol"]

_LONGEST_URL = 8192
_MOST_PIPELINED = 32
_LEAST_BODY_RATE = 16 * 1024  # bytes a second
# A connection that is closed with bytes unread is reset, and the client may never see what it was answered. So what
# arrives after an answer without more of the request is read and thrown away for so long.
_LINGER_SECONDS = 2.0
# Answered even when there are more connections than may be, if not very many more.
_PROBES = frozenset(("/health", "/live", "/ready"))
_MOST_EXTRA_CONNECTIONS = 64


class _Reading(enum.Enum):
    """What is to come from the client."""

    NOTHING = enum.auto()  # between two requests
    HEAD = enum.auto()
    BODY = enum.auto()
    DISCONNECT = enum.auto()  # the request is whole
    THROWN_AWAY = enum.auto()  # it has been refused


class HttpProtocol(HttpToolsProtocol):
    """Args:

    limits: the bounds.
    max_connections: of this process.
    on_refused: told of each refusal: the client's address, status, message.
    refusal_headers: from a request's headers, as far as they have come, to more of a refusal's.
    options: uvicorn's.
    """

    def __init__(
        self,
        *,
        limits: LimitsConfig,
        max_connections: int,
        on_refused: Callable[[tuple[str, int] | None, int, str], None],
        refusal_headers: Callable[[RawHeaders], list[tuple[bytes, bytes]]],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._limits = limits
        self._max_connections = max_connections
        self._on_refused = on_refused
        self._refusal_headers = refusal_headers
        self.headers = []  # until there is a request
        self._running: RequestResponseCycle | None = None  # whose app runs, or ran last
        self._reading = _Reading.HEAD
        self._deadline = math.inf  # for what is to come
        self._fault: HTTPException | None = None  # why a callback has stopped the parser
        self._num_headers_bytes = 0
        self._num_unparsed_bytes = 0
        self._unsent = 0  # bytes that wait to be written, when the sweep last looked
        self._unsent_since = 0.0
        self._is_extra = False

    # ---- the connection ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        num_extra = len(self.connections) - self._max_connections
        if num_extra > _MOST_EXTRA_CONNECTIONS:
            self.transport.abort()
        self._is_extra = num_extra > 0
        if self._is_extra:
            self.app = self._only_probes(self.app)
        self._deadline = self.loop.time() + (_LINGER_SECONDS if self._is_extra else self._limits.request_header_timeout)

    def _only_probes(self, app: Any) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] in _PROBES:
                await app(scope, receive, send)
                return
            message = "the server has as many connections as it may have (--max-connections); try again later"
            self._on_refused(self.client, 503, message)
            refusal = BodyRefusal(UnavailableError(message), self._refusal_headers(scope["headers"]))
            await refusal(scope, receive, send)

        return answer

    def check(self, now: float) -> None:
        """Ends what has taken too long. ``now``: the loop's time."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        elif now - self._unsent_since >= self._limits.write_timeout:
            waited = f"{self._limits.write_timeout:g} s"
            self._on_refused(self.client, 499, f"it has accepted nothing of its answer for {waited} (--write-timeout)")
            self.transport.abort()
            return
        if now >= self._deadline and not self.transport.is_closing():
            self._on_late(now)

    def _on_late(self, now: float) -> None:
        if self.flow.read_paused:  # it is the app that does not read
            self._deadline = now + self._limits.request_body_timeout
        elif self._reading is _Reading.HEAD and self._num_unparsed_bytes > 0:
            self._refuse(HTTPException(408, "the request's headers took too long (--request-header-timeout)"))
        elif self._reading is _Reading.BODY and not self.cycle.response_complete:
            self._refuse(HTTPException(408, "the request's body took too long (--request-body-timeout)"))
        else:
            self.transport.close()

    # ---- what arrives -----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._reading is _Reading.THROWN_AWAY:
            return
        if self._reading is _Reading.NOTHING:
            self._begin_head()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._fault or HTTPException(400, "this is not HTTP/1.1, or its framing is wrong"))

    def _feed(self, data: bytes) -> None:
        before = self._reading
        self._num_unparsed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_without_upgrade(data[upgrade.args[0] :])
        # The parser keeps a header or a trailer to itself until it is whole.
        if self._reading is before and self._reading in (_Reading.HEAD, _Reading.BODY):
            self._check_headers(self._num_unparsed_bytes)

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Another protocol is an offer, which is declined. But the parser would leave out the request's body: another
        one reads the same head without the offer."""
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        head += [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"".join([*head, b"\r\n", rest]))

    def _check_headers(self, num_bytes: int) -> None:
        most = self._limits.max_header_bytes
        if num_bytes > most:
            self._fail(431, f"the request's headers are larger than {most} bytes (--h11-max-incomplete-event-size)")

    def _fail(self, status: int, message: str) -> None:
        """Stops the parser, from within a callback."""
        self._fault = HTTPException(status, message)
        raise httptools.HttpParserError(message)

    def _begin_head(self) -> None:
        self._reading = _Reading.HEAD
        self._num_headers_bytes = self._num_unparsed_bytes = 0
        self._deadline = self.loop.time() + self._limits.request_header_timeout

    # ---- the parser's callbacks -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._reading is not _Reading.HEAD:  # it has come together with the end of another
            self._begin_head()
        self._num_headers_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > _LONGEST_URL:
            self._fail(414, f"the request's URL is longer than {_LONGEST_URL} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is not _Reading.HEAD:  # a trailer: nobody has asked for it
            return
        super().on_header(name, value)
        most = self._limits.max_header_count
        if len(self.headers) > most:
            self._fail(431, f"the request has more than {most} headers (--h11-max-header-count)")
        self._num_headers_bytes += len(name) + len(value) + 4
        self._check_headers(self._num_headers_bytes)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return  # it will be read again
        if len(self.pipeline) >= _MOST_PIPELINED:
            self._fail(400, f"more than {_MOST_PIPELINED} requests were sent without waiting for an answer")
        super().on_headers_complete()
        self._reading = _Reading.BODY
        self._num_unparsed_bytes = 0
        self._deadline = self.loop.time() + self._limits.request_body_timeout
        # A client that may be answered before it has sent the body: nobody could say where the next request begins.
        if self.expect_100_continue or self._is_extra:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = WholeAnswers(cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._num_unparsed_bytes = 0
        if not self.cycle.response_complete:
            self._deadline += len(body) / _LEAST_BODY_RATE
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._reading is _Reading.HEAD:  # what is to be read again
            return
        super().on_message_complete()
        if self.cycle.response_complete:
            self._await_request()
        else:
            self._reading = _Reading.DISCONNECT
            self._deadline = math.inf

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's timer: there is the sweep
        if self.cycle.response_complete:
            if self._reading is _Reading.DISCONNECT:
                self._await_request()
            elif self._reading is _Reading.BODY:
                self._deadline = self.loop.time() + LINGER_SECONDS

    def _await_request(self) -> None:
        self._reading = _Reading.NOTHING
        self._deadline = self.loop.time() + self._limits.keep_alive_timeout

    # ---- refusal ----------------------------------------------------------------------------------------------------

    def _refuse(self, fault: HTTPException) -> None:
        """Answers, closes the connection, and takes in nothing more."""
        own = self.cycle if self._reading is _Reading.BODY else None
        self._reading = _Reading.THROWN_AWAY
        self._deadline = math.inf
        self._on_refused(self.client, fault.status_code, fault.detail)
        running = self._running
        if running is not None and running is not own and not running.response_complete:
            # The answer to a request before this one is under way, and no other may be mixed with it: it is the last.
            self.pipeline.clear()
            running.keep_alive = False
            return
        if own is not None:
            own.disconnected = True  # to the app, which may wait for the rest
            own.message_event.set()
            if own.response_started:
                self.transport.close()
                return
        self._answer(fault)

    def _answer(self, fault: HTTPException) -> None:
        response = error_response(fault)
        headers = [*self.server_state.default_headers, *response.raw_headers, *self._refusal_headers(self.headers)]
        headers.append((b"connection", b"close"))
        head = [STATUS_LINE[response.status_code], *(b"%b: %b\r\n" % header for header in headers), b"\r\n"]
        self.transport.write(b"".join(head) + bytes(response.body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._deadline = self.loop.time() + _LINGER_SECONDS
