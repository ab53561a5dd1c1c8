"""The response of a route that computes something: one body, or server-sent events.

Nothing is sent before the first event is there, so that whatever goes wrong until then (a refusal of the engine's, too)
has its own status. What goes wrong later is told by an event. Every stream that was begun ends with ``data: [DONE]``.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.active_requests import ActiveRequests
from octavo.entrypoints.errors import error_event, error_info
from octavo.entrypoints.openai import Answer
from octavo.entrypoints.openai.responses import encode, encode_in_pieces
from octavo.entrypoints.stream_parts import send_of_parts
from octavo.errors import OctavoError
from octavo.logging import init_logger

__all__ = ["CLIENT_CLOSED_REQUEST", "AnswerResponse"]

logger = init_logger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it stands in the access log
_DONE = b"data: [DONE]\n\n"


class AnswerResponse(Response):
    """From the beginning of the work to the last byte of a stream all is one task, which ``active`` can end at any
    moment: a stream that was begun is closed by whoever began it.

    Args:
        create: begins the work. Not called if nothing is to be begun any more.
        active: where the work is registered while it goes on.
        headers_of: an answer, beside those of every answer of its kind.
    """

    def __init__(
        self,
        create: Callable[[], Coroutine[Any, Any, Answer]],
        active: ActiveRequests,
        headers_of: Callable[[Answer], dict[str, str]],
    ) -> None:
        super().__init__()
        self._create = create
        self._active = active
        self._headers_of = headers_of
        self._body = b""
        self._begun = False  # a stream: its status has been sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._active.run(self._work(scope, send), receive)
        except ClientDisconnect:
            if not self._begun:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
        except Exception as error:
            if not self._begun:
                raise
            if not isinstance(error, OctavoError):
                logger.exception("stream failed")
            scope["state"]["stream_error"] = error_info(error).code  # for the access log, which has seen a 200
            await _end(send, error_event(error) + _DONE)
        else:
            if self._begun:
                await _end(send, _DONE)
            else:
                response = Response(self._body, headers=self._headers_of(answer), media_type="application/json")
                await response(scope, receive, send)

    async def _work(self, scope: Scope, send: Send) -> Answer:
        """Computes the answer; the events of a stream are sent as they come."""
        answer = await self._create()
        scope["state"]["token_count"] = answer.token_count  # for the access log
        if isinstance(answer.content, AsyncGenerator):
            async with aclosing(answer.content) as events:
                first = await anext(events, b"")
                await self._begin(answer, send)
                await send({"type": "http.response.body", "body": first, "more_body": True})
                send_part = send_of_parts(scope, send)
                async for event in events:
                    await send_part({"type": "http.response.body", "body": event, "more_body": True})
        elif answer.has_tables:
            self._body = await asyncio.to_thread(encode_in_pieces, answer.content)
        else:
            self._body = encode(answer.content)
        return answer

    async def _begin(self, answer: Answer, send: Send) -> None:
        self._begun = True
        unbuffered = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        head = Response(headers=self._headers_of(answer) | unbuffered, media_type="text/event-stream")
        del head.headers["content-length"]
        await send({"type": "http.response.start", "status": head.status_code, "headers": head.raw_headers})


async def _end(send: Send, last: bytes) -> None:
    await send({"type": "http.response.body", "body": last, "more_body": False})
