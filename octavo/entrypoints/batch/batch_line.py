"""A line of OpenAI's batch format: what is asked in it, and the line that answers it.

In: ``{"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}``.
Out: ``{"id": …, "custom_id": …, "response": {"status_code": …, "request_id": …, "body": {…}}, "error": null}``.
What was refused or failed has the status and body that the route would have answered with. A line that asks nothing
that could be answered has no response but an error.
"""

import hashlib
from typing import Any

import msgspec

from octavo.entrypoints.json_text import lone_surrogate, repeated_field
from octavo.entrypoints.openai.responses import encode

__all__ = ["ROUTES", "BadLine", "BatchRequest", "answer_line", "error_line", "is_transient", "line_id", "read_line"]

# URL of the batch format → name of the object in Services.
ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

_LONGEST_SHOWN = 100


class BatchRequest(msgspec.Struct):
    """``body``: that of the route."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class BadLine(Exception):  # noqa: N818 (it is a kind of line)
    """The line asks nothing that could be answered. ``custom_id``: the line's, where it has one."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class _CustomId(msgspec.Struct):
    custom_id: str | None = None


_decode = msgspec.json.Decoder(BatchRequest).decode
_decode_id = msgspec.json.Decoder(_CustomId).decode


def read_line(line: bytes) -> BatchRequest:
    """Raises BadLine."""
    try:
        request = _decode(line)
    except (msgspec.MsgspecError, RecursionError) as error:
        surrogate = lone_surrogate(line)
        why = str(error) if surrogate is None else f"it has {surrogate}, half of a surrogate pair, which is not text"
        if isinstance(error, RecursionError):
            why = "it is nested too deeply"
        expected = '{"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'
        raise BadLine(f"{why}; expected {expected}", _custom_id(line)) from None
    repeated = repeated_field(line, msgspec.json.decode(line))
    if repeated is not None:
        name = repeated.name[:_LONGEST_SHOWN] or "a field"
        raise BadLine(f"{name} is there more than once in one object; state it once", request.custom_id)
    if request.method != "POST":
        raise BadLine(f"method must be POST, got {request.method!r:.{_LONGEST_SHOWN}}", request.custom_id)
    if request.url not in ROUTES:
        known = " or ".join(ROUTES)
        raise BadLine(f"url must be {known}, got {request.url!r:.{_LONGEST_SHOWN}}", request.custom_id)
    return request


def _custom_id(line: bytes) -> str | None:
    try:
        return _decode_id(line).custom_id
    except (msgspec.MsgspecError, RecursionError):
        return None


def line_id(line: bytes) -> str:
    """The id of the answer to this line: it tells which line was answered, even if that has no custom_id."""
    return "batch_req_" + hashlib.blake2b(line.strip(), digest_size=12).hexdigest()


def answer_line(
    answer_id: str,
    custom_id: str,
    status: int,
    request_id: str,
    body: msgspec.Struct | dict[str, Any],
    headers: dict[str, str],
) -> bytes:
    """Args:

    answer_id: line_id of the line that is answered.
    body: what the route answers.
    headers: what the route would have said beside it; left out where there are none.
    """
    response: dict[str, Any] = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(encode(body))}
    if headers:
        response["headers"] = headers
    return _line({"id": answer_id, "custom_id": custom_id, "response": response, "error": None})


def is_transient(status: int) -> bool:
    """Whether the same request may succeed another time."""
    return status == 429 or status >= 500


def error_line(line: bytes, number: int, bad: BadLine) -> bytes:
    """``number``: of the line in its file, from 1."""
    error = {"code": "bad_line", "message": str(bad), "line": number}
    return _line({"id": line_id(line), "custom_id": bad.custom_id, "response": None, "error": error})


def _line(entry: dict[str, Any]) -> bytes:
    return msgspec.json.encode(entry) + b"\n"
