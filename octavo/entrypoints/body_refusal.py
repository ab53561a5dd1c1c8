"""The answer to a request that is the last of its connection, while its body is still arriving.

A connection that is closed with bytes unread is reset, and many clients then never see what they were answered. So the
answer is sent at once, and what arrives meanwhile is read and thrown away, for a while.
"""

import asyncio
import contextlib
from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.errors import error_response

__all__ = ["LINGER_SECONDS", "BodyRefusal"]

# Many clients send all before they read anything: what one is likely to have sent by mistake, at the speed of a LAN or
# a good line. What comes beyond costs the client its answer, and the server nothing.
LINGER_SECONDS = 4.0
_BYTES = 256 * 1024 * 1024


class BodyRefusal(Response):
    """Args:

    error: what the client is told.
    headers: beside those of every error.
    """

    def __init__(self, error: Exception, headers: Iterable[tuple[bytes, bytes]]) -> None:
        told = error_response(error)
        super().__init__(told.body, told.status_code)
        # What is beyond the bounds stays unread, so nothing else can come on this connection.
        self.raw_headers = [*told.raw_headers, (b"connection", b"close"), *headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await _throw_away(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _throw_away(receive: Receive) -> None:
    size = 0
    while size < _BYTES:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            return
