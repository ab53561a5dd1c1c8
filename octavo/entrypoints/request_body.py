"""From bytes on the wire to a JSON object, with bounds on size and depth. Knows nothing of what the fields mean."""

import json
import math
from typing import Any

import msgspec
from starlette.requests import Request

from octavo.entrypoints.errors import PayloadTooLargeError, SchemaError

__all__ = ["read_json_object"]

_decode = msgspec.json.Decoder().decode

# Larger bodies with a fault are not read a second time to find the field at fault.
_LONGEST_DIAGNOSED = 64 * 1024


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The request's body.

    Raises:
        SchemaError: it is not a JSON object, or not said to be one.
        PayloadTooLargeError: it is larger than ``max_bytes``; reading stops there.
        starlette.requests.ClientDisconnect: the client went away before its end.
    """
    _check_content_type(request.headers.get("content-type", ""))
    body = await _read(request, max_bytes)
    try:
        value = _decode(body)
    except RecursionError:
        raise SchemaError("the request body is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise _explained(body, error) from None
    if not isinstance(value, dict):
        raise SchemaError(f"the request body must be a JSON object, got {_json_name(value)}")
    return value


def _check_content_type(content_type: str) -> None:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        stated = f"got {media_type[:60]!r}" if media_type else "none was given"
        raise SchemaError(f"the Content-Type header must be application/json, {stated}")


async def _read(request: Request, max_bytes: int) -> bytes:
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
        parts.append(part)
    return b"".join(parts)


def _explained(body: bytes, error: msgspec.MsgspecError) -> SchemaError:
    """Names the field, where the fault is a number that JSON or this server does not have."""
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
    return SchemaError(f"the request body is not valid JSON: {error}")


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "an array", str: "a string", bool: "a boolean"}.get(type(value), "a number")
