"""From bytes on the wire to a request, with bounds on size and depth and on how much of it there is to take apart: that
holds up everybody else. Knows nothing of what the fields mean.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from octavo.entrypoints.errors import PayloadTooLargeError, SchemaError, UnavailableError
from octavo.entrypoints.json_text import between_strings, lone_surrogate, repeated_field

__all__ = ["BodyMemory", "read_request"]

_Request = TypeVar("_Request")

_decode = msgspec.json.Decoder().decode

# So much is decoded in less time than a thread would take to begin.
_LONGEST_INLINE = 64 * 1024
# A tenth or two of a second's work each: many fields are slow, ids of tokens are not.
_MOST_CONTAINERS = 1 << 19
_MOST_VALUES = (1 << 22) + (1 << 16)
_MOST_LARGE_BODIES = 8

# Larger bodies with a fault are not read a second time to find the field at fault.
_LONGEST_DIAGNOSED = 64 * 1024


class BodyMemory:
    """What large bodies take together while they arrive and are taken apart; small ones always find room.

    Args:
        max_bytes: of one body.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._left = max_bytes * _MOST_LARGE_BODIES

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """One body's. What is given takes so many bytes more, or raises UnavailableError."""
        held = 0

        def take(num_bytes: int) -> None:
            nonlocal held
            if num_bytes > self._left:
                raise UnavailableError("the server has as many large requests as it can take at once; try again later")
            held += num_bytes
            self._left -= num_bytes

        try:
            yield take
        finally:
            self._left += held


async def read_request(request: Request, memory: BodyMemory, parse: Callable[[dict[str, Any]], _Request]) -> _Request:
    """What ``parse`` makes of the JSON object in the request's body.

    Raises:
        HTTPException: 415, it is compressed.
        UnavailableError: there is no room for it in ``memory``.
        SchemaError: it is not a JSON object, not said to be one, one of too many parts, or has a field twice.
        PayloadTooLargeError: it is larger than one may be; reading stops there.
        starlette.requests.ClientDisconnect: the client went away before its end.
        RequestError: by ``parse``.
    """
    _check_content_encoding(request.headers.get("content-encoding", ""))
    _check_content_type(request.headers.get("content-type", ""))
    with memory.share() as take:
        body = await _read(request, memory.max_bytes, take)
        if len(body) <= _LONGEST_INLINE:
            return parse(_json_object(body))

        def check_and_parse() -> _Request:
            _check_parts(body)
            return parse(_json_object(body))

        return await asyncio.to_thread(check_and_parse)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = _decode(body)
    except RecursionError:
        raise SchemaError("the request body is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise _explained(body, error) from None
    if not isinstance(value, dict):
        raise SchemaError(f"the request body must be a JSON object, got {_json_name(value)}")
    repeated = repeated_field(body, value)
    if repeated is not None:
        name = repeated.name[:60]
        message = f"{name or 'a field'} is there more than once in one object of the request body; state it once"
        raise SchemaError(message, param=name if repeated.is_outermost else None)
    return value


def _check_parts(body: bytes) -> None:
    """The decoder lets nothing else go on, in whatever thread it works: it gets what it can do in a moment."""
    if _num_containers(body) <= _MOST_CONTAINERS and body.count(b",") <= _MOST_VALUES:
        return
    outside = between_strings(body)
    if _num_containers(outside) > _MOST_CONTAINERS:
        raise SchemaError(f"the request body has more than {_MOST_CONTAINERS} arrays, objects and fields of objects")
    if outside.count(b",") > _MOST_VALUES:
        raise SchemaError(f"the request body has more than {_MOST_VALUES} values")


def _num_containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{") + body.count(b":")


def _check_content_encoding(encoding: str) -> None:
    """What a few bytes may become is beyond all bounds, so nothing is unpacked."""
    if encoding.strip().lower() not in ("", "identity"):
        message = f"the request body is compressed (Content-Encoding: {encoding[:60]}); send it as it is"
        raise HTTPException(415, message, {"accept-encoding": "identity"})


def _check_content_type(content_type: str) -> None:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        stated = f"got {media_type[:60]!r}" if media_type else "none was given"
        raise SchemaError(f"the Content-Type header must be application/json, {stated}")


async def _read(request: Request, max_bytes: int, take: Callable[[int], None]) -> bytes:
    message = f"the request body is larger than {max_bytes} bytes (--max-body-bytes)"
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > max_bytes:
        raise PayloadTooLargeError(message)
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise PayloadTooLargeError(message)
        if size > _LONGEST_INLINE:
            take(len(part))
        parts.append(part)
    return b"".join(parts)


def _explained(body: bytes, error: msgspec.MsgspecError) -> SchemaError:
    """Names the field, where the fault is a number that JSON or this server does not have."""
    if not body.strip():
        return SchemaError("the request body is empty; a JSON object was expected")
    if len(body) <= _LONGEST_DIAGNOSED:
        try:
            value = json.loads(body)  # takes NaN, Infinity and 1e999
        except (ValueError, RecursionError):
            value = None
        for name, entry in value.items() if isinstance(value, dict) else ():
            if isinstance(entry, float) and not math.isfinite(entry):
                return SchemaError(f"{name[:60]} must be a finite number", param=name[:60])
            if isinstance(entry, int) and entry.bit_length() > 64:
                return SchemaError(f"{name[:60]} is an integer out of range", param=name[:60])
    surrogate = lone_surrogate(body)
    if surrogate is not None:
        return SchemaError(f"the request body has {surrogate}, half of a surrogate pair, which is not text")
    return SchemaError(f"the request body is not valid JSON: {error}")


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "an array", str: "a string", bool: "a boolean"}.get(type(value), "a number")
