"""An HTTP/1.1 client that costs little: its processor time is the server's, where both are on one machine.

A connection is an asyncio Protocol over httptools' parser; what arrives goes to a reader at once, in the callback that
brings it, without a task in between. Connections are kept and used again, the last used first.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from octavo.errors import ConfigError, OctavoError

__all__ = ["AnswerReader", "CutError", "HttpClient", "UnreachableError"]

# Servers close idle connections after some seconds. A request that is sent just then is lost, by nobody's fault.
_LONGEST_IDLE_SECONDS = 1.0


class UnreachableError(OctavoError):
    """No connection to the server could be made."""


class CutError(OctavoError):
    """The connection ended before the answer did, or what came is not HTTP."""


class AnswerReader(Protocol):
    """Takes in one answer."""

    def on_status(self, status: int) -> None: ...

    def on_data(self, part: bytes) -> None: ...


class _Connection(asyncio.Protocol):
    """One answer at a time. Its callbacks are those of asyncio and of httptools.

    Attributes:
        is_open: it can be used again.
        idle_since: when its last answer had ended.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.idle_since = 0.0
        self._heard = False  # of the answer
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._reader: AnswerReader | None = None
        self._ended: asyncio.Future[None] | None = None
        self._has_length = False

    async def exchange(self, request: bytes, reader: AnswerReader) -> None:
        """Sends a request; returns when its answer has ended. Raises CutError."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._reader, self._heard, self._has_length = reader, False, False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._ended is None or self._ended.done():
            self.close()  # nothing was asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self._ended.done():
                self._ended.set_exception(CutError(f"the answer is not HTTP/1.1 ({error})"))

    def eof_received(self) -> None:
        # An answer that states no length ends with its connection.
        if self._heard and not self._has_length:
            self.on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(CutError(f"the connection ended before the answer did ({error or 'closed'})"))

    # ---- httptools --------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, _: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        assert self._reader is not None
        self._reader.on_status(self._parser.get_status_code())

    def on_body(self, part: bytes) -> None:
        assert self._reader is not None
        self._reader.on_data(part)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.is_open = False
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class HttpClient:
    """Args:

    base_url: ``http[s]://host[:port][/path]``.
    headers: of every request.
    insecure: any certificate will do.

    Raises:
        ConfigError: the address or a header is none.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], *, insecure: bool = False) -> None:
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--base-url {base_url} is not an address: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {base_url} is not an address; it looks like http://localhost:8000")
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/")
        self._ssl = _tls(insecure) if parts.scheme == "https" else None
        lines = {"host": parts.netloc.rpartition("@")[2], "accept": "*/*", "content-type": "application/json"}
        lines |= {name.lower(): value for name, value in headers.items()}
        self._headers = "".join(_line(name, value) for name, value in lines.items())
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    def encode(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """A request, as it goes over the wire."""
        own = "".join(_line(name, value) for name, value in (headers or {}).items())
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{own}content-length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body

    async def send(self, request: bytes, reader: AnswerReader) -> None:
        """Returns when the answer has ended.

        Raises:
            UnreachableError, CutError
        """
        connection = self._take_idle()
        if connection is None:
            connection = await self._connect()
        try:
            await connection.exchange(request, reader)
        finally:
            self._give_back(connection)

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since < _LONGEST_IDLE_SECONDS:
                return connection
            connection.close()
            self._open.discard(connection)
        return None

    def _give_back(self, connection: _Connection) -> None:
        if connection.is_open:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()
            self._open.discard(connection)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except (OSError, ssl.SSLError) as error:
            raise UnreachableError(f"no connection to {self._host}:{self._port} ({error})") from None
        self._open.add(connection)
        return connection

    def close(self) -> None:
        for connection in self._open:
            connection.close()


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _line(name: str, value: str) -> str:
    text = f"{name}: {value}"
    if not text.isascii() or not text.isprintable() or not name or set(name) & set(' :"(),/;<=>?@[]{}\\'):
        raise ConfigError(f"{name!r:.100} with the value {value!r:.100} is no HTTP header (--header KEY=VALUE)")
    return text + "\r\n"
