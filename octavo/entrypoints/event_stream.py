"""A response of server-sent events: sends what a generator yields, ends it when the client goes away, and turns its
failure into an error event. Every stream ends with ``data: [DONE]``, whatever has happened."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.active_requests import ActiveRequests
from octavo.entrypoints.errors import error_event
from octavo.errors import OctavoError
from octavo.logging import init_logger

__all__ = ["EventStream"]

logger = init_logger(__name__)

_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Args:

    events: yields whole events as bytes; closed in every case.
    active: where the generation is registered while it runs.
    headers: beside those of the stream itself.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], active: ActiveRequests, headers: dict[str, str]) -> None:
        super().__init__(headers=headers | {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._active = active

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = _DONE
        try:
            await self._active.run(self._send_events(send), receive)
        except ClientDisconnect:
            return
        except Exception as error:
            if not isinstance(error, OctavoError):
                logger.exception("stream failed")
            last = error_event(error) + _DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
