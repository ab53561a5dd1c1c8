"""The answer to a body that is too large, while it is still arriving.

A connection that is closed with bytes unread is reset, and many clients then never see what they were answered. So the
answer is sent at once, and what arrives meanwhile is read and thrown away, for a while.
"""

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.errors import PayloadTooLargeError, error_response

__all__ = ["BodyRefusal"]

_SECONDS = 2.0
_BYTES = 32 * 1024 * 1024


class BodyRefusal(Response):
    """Args:

    error: what the client is told.
    request_id: of the request.
    """

    def __init__(self, error: PayloadTooLargeError, request_id: str) -> None:
        told = error_response(error)
        super().__init__(told.body, told.status_code, media_type=told.media_type)
        # What is beyond the bounds stays unread, so nothing else can come on this connection.
        self.headers.update({"connection": "close", "x-request-id": request_id})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS):
                await _throw_away(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _throw_away(receive: Receive) -> None:
    size = 0
    while size < _BYTES:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            return
