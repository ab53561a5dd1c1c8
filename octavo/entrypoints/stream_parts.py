"""A way for the parts of a stream past the layers of the app, which only look at how an answer begins and ends: past
them all, for every token of every stream, costs more than making the token's event.

The head of an answer, its first part and its last one go the usual way. What lies between may go straight to ``send``
of the innermost layer that has to see it: the HTTP server, or the operator's middleware.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["StreamParts", "send_of_parts"]

_NAME = "send_part"


class StreamParts:
    """ASGI layer: the parts of streams need not pass those between the app and itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[_NAME] = send
        await self._app(scope, receive, send)


def send_of_parts(scope: Scope, send: Send) -> Send:
    """What the parts between the first and the last go to.

    Args:
        send: of the app itself, for where there is no other.
    """
    found: Send = scope["state"].get(_NAME, send)
    return found
