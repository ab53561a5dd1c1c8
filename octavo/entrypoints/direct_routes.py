"""The routes that are asked all the time, without what FastAPI and Starlette put around each route: that takes more
than all the rest of a request, beside its tokens. Theirs is everything else, other methods of these paths too.
"""

from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints.errors import on_error
from octavo.errors import OctavoError

__all__ = ["DirectRoutes", "Handler"]

Handler = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """ASGI layer, right around the app.

    Args:
        app: answers what is not for one of the handlers.
        handlers: what answers a POST, by path. What they raise is answered as the app would.
        root_path: may stand before the paths.
    """

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler], root_path: str = "") -> None:
        self._app = app
        self._handlers = handlers
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = None
        if scope["type"] == "http" and scope["method"] == "POST":
            handler = self._handlers.get(scope["path"].removeprefix(self._root_path))
        if handler is None:
            await self._app(scope, receive, send)
            return
        begun = False

        def send_seen(message: Message) -> Awaitable[None]:
            nonlocal begun
            begun = True
            return send(message)

        request = Request(scope, receive)
        try:
            response = await handler(request)
            await response(scope, receive, send_seen)
        except Exception as error:
            if not begun:
                refusal = await on_error(request, error)
                await refusal(scope, receive, send)
            if begun or not isinstance(error, HTTPException | OctavoError):
                raise  # for the HTTP server, which logs it
