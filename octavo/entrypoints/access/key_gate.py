"""Lets requests in that bring a key, each key within its limits. Nothing of a request that is not let in is read.

Without a key only GET and HEAD of three exact paths are answered. Every POST counts against the limits, whatever its
path; nothing else does. A request is under way until its response has ended, however it ends.
"""

import hashlib
import hmac
import math
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints.access.api_keys import ApiKey
from octavo.entrypoints.access.ledger import Ledger, Standing
from octavo.entrypoints.errors import TooManyRequestsError, error_response
from octavo.errors import RequestError

__all__ = ["KeyGate", "bound_priority"]

# The allow-list. Compared with the path as it was sent and as it will be routed, so that no spelling opens another.
_OPEN_PATHS = frozenset({"/health", "/live", "/ready"})
_OPEN_METHODS = frozenset({"GET", "HEAD"})
_UNAUTHORIZED = b'{"error":"Unauthorized"}'


class KeyGate:
    """Args:

    app: what is behind it.
    keys: those that open it.
    ledger: has a record of each key.

    The key's name is left in the scope's state as ``api_key_name``, for logs.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], ledger: Ledger) -> None:
        self._app = app
        self._keys = keys
        self._ledger = ledger

    def replace_keys(self, keys: Sequence[ApiKey]) -> None:
        """For the requests to come; what a key has used of its limits stays used."""
        self._ledger.add(keys)
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_open(scope):
            return await self._app(scope, receive, send)
        key = self._key_of(scope["headers"])
        if key is None:
            headers = {"www-authenticate": "Bearer"}
            response = Response(_UNAUTHORIZED, 401, headers, media_type="application/json")
            return await response(scope, receive, send)
        scope.setdefault("state", {}).update(api_key_name=key.name, api_key_priority=key.priority)
        if scope["method"] != "POST" or not key.is_limited:
            return await self._app(scope, receive, send)
        return await self._run_limited(key, scope, receive, send)

    async def _run_limited(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        standing = self._ledger.admit(key)
        headers = _rate_headers(standing)
        if standing.refusal is not None:
            response = error_response(TooManyRequestsError(standing.refusal))
            response.headers["retry-after"] = str(math.ceil(standing.retry_seconds))
            response.raw_headers += headers
            return await response(scope, receive, send)

        def send_with_headers(message: Message) -> Awaitable[None]:  # not async: it is called for every token
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *headers]}
            return send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            self._ledger.release(key)

    def _key_of(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiKey | None:
        """The key that a request brings, if it is one of ours."""
        authorization = api_key = None
        for name, value in headers:
            if name == b"authorization" and authorization is None:
                authorization = value
            elif name == b"x-api-key" and api_key is None:
                api_key = value
        found = None
        for brought in (api_key, _bearer(authorization)):
            if brought is not None:
                found = self._equal(brought) or found
        return found

    def _equal(self, brought: bytes) -> ApiKey | None:
        """Takes as long whichever key it is, and if it is none."""
        digest = hashlib.sha256(brought).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    return scope.get("method") in _OPEN_METHODS and path in _OPEN_PATHS and bool(scope.get("raw_path") == path.encode())


def _bearer(authorization: bytes | None) -> bytes | None:
    scheme, _, token = (authorization or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def _rate_headers(standing: Standing) -> list[tuple[bytes, bytes]]:
    values = {
        "limit": str(standing.limit),
        "remaining": str(standing.remaining),
        "reset": f"{max(0.0, standing.reset_seconds):.3f}s",
    }
    return [(f"x-ratelimit-{name}-requests".encode(), value.encode()) for name, value in values.items()]


def bound_priority(scope: Scope, stated: int | None) -> int | None:
    """The priority of a request that states this one: its key's, unless it states a less urgent one.

    Raises:
        RequestError: it states a more urgent one.
    """
    of_key: Any = scope.get("state", {}).get("api_key_priority")
    if of_key is None or stated is None:
        return of_key if stated is None else stated
    if stated < of_key:
        message = f"priority must be {of_key} or higher (less urgent) with this API key, got {stated}"
        raise RequestError(message, param="priority")
    return stated
