"""OpenAI's error shape: which status, type and text each exception becomes, in a response and inside a stream.

Bodies are small and say nothing of the server's insides: no paths, no tracebacks, no text of unexpected exceptions.
"""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import EngineDeadError, OverloadedError, RequestError, RequestFailedError

__all__ = [
    "ErrorInfo",
    "PayloadTooLargeError",
    "SchemaError",
    "TooManyRequestsError",
    "UnavailableError",
    "error_event",
    "error_info",
    "error_response",
    "on_error",
]

_LONGEST_MESSAGE = 500
_RETRY_AFTER_SECONDS = 5
_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "Service Unavailable",
}


class SchemaError(RequestError):
    """The body is not JSON, or its fields are not of the types that the route takes."""


class PayloadTooLargeError(RequestError):
    """The body is larger than the server accepts."""

    status = 413


class TooManyRequestsError(RequestError):
    """The client's key has used up its limits for now."""

    status = 429


class UnavailableError(RequestError):
    """The server does not serve requests at the moment: loading, going down or dead."""

    status = 503


class ErrorInfo(msgspec.Struct):
    """What stands under "error". ``code`` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


def error_info(error: Exception) -> ErrorInfo:
    """What a client is told of an exception. The text of an unexpected one stays in the log."""
    if isinstance(error, RequestError):
        kind = "Bad Request" if isinstance(error, SchemaError) else _type_name(error.status)
        return ErrorInfo(_short(str(error)), kind, error.param, error.status)
    if isinstance(error, HTTPException):
        return ErrorInfo(_short(str(error.detail)), _type_name(error.status_code), None, error.status_code)
    if isinstance(error, EngineDeadError):
        return ErrorInfo("the engine has died; the server is going down", _type_name(503), None, 503)
    if isinstance(error, RequestFailedError):
        return ErrorInfo(_short(str(error)), _type_name(error.status), None, error.status)
    return ErrorInfo("internal server error", _type_name(500), None, 500)


def error_response(error: Exception) -> Response:
    """The response for an exception."""
    info = error_info(error)
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException) and isinstance(error.headers, Mapping):
        headers.update(error.headers)
    if info.code == HTTPStatus.SERVICE_UNAVAILABLE:
        retry_after = error.retry_after if isinstance(error, OverloadedError) else _RETRY_AFTER_SECONDS
        headers["retry-after"] = str(retry_after)
    return Response(_encode(info), info.code, headers, media_type="application/json")


def error_event(error: Exception) -> bytes:
    """The server-sent event that ends a stream in failure."""
    return b"data: " + _encode(error_info(error)) + b"\n\n"


async def on_error(request: Request, error: Exception) -> Response:
    """Exception handler of the app. Unexpected exceptions go on to the HTTP server, which logs them."""
    response = error_response(error)
    request_id = getattr(request.state, "request_id", None)
    if request_id is not None:
        response.headers["x-request-id"] = request_id
    return response


def _encode(info: ErrorInfo) -> bytes:
    return msgspec.json.encode({"error": info})


def _type_name(status: int) -> str:
    return _TYPES.get(status) or HTTPStatus(status).phrase


def _short(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "..."
