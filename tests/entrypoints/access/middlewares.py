"""What operators may write for --middleware: good ones, and bad ones."""

from collections.abc import Callable
from typing import Any

__all__ = [
    "NOT_CALLABLE",
    "Anonymous",
    "Broken",
    "Marking",
    "Shouting",
    "Unmakeable",
    "bring_key",
    "deny",
    "mark_too",
    "plain",
]

NOT_CALLABLE = 5


class Marking:
    """ASGI: adds a header to every answer."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-marks", b"class")]
            await send(message)

        await self.app(scope, receive, send_marked)


class Shouting:
    """ASGI: changes every part of every answer."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_loud(message: Any) -> None:
            if message["type"] == "http.response.body":
                message["body"] = message["body"].upper()
            await send(message)

        await self.app(scope, receive, send_loud)


class Broken:
    """Fails on every request."""

    def __init__(self, app: Any) -> None:
        pass

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a fault of /home/secret.py")


class Unmakeable:
    def __init__(self, app: Any) -> None:
        raise OSError("no licence")


class Anonymous:
    """Takes no app."""


async def mark_too(request: Any, call_next: Callable[[Any], Any]) -> Any:
    response = await call_next(request)
    response.headers.append("x-marks", "function")
    return response


async def bring_key(request: Any, call_next: Callable[[Any], Any]) -> Any:
    """Knows its users by a cookie."""
    if request.cookies.get("user") == "alice":
        request.scope["headers"] = [*request.scope["headers"], (b"x-api-key", b"sk-a")]
    return await call_next(request)


async def deny(request: Any, call_next: Callable[[Any], Any]) -> Any:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse("no", 403)


def plain(request: Any, call_next: Callable[[Any], Any]) -> Any:
    """Not a coroutine function."""
