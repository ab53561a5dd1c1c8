"""The id of an HTTP request: the client's own, where it is fit to stand in logs and headers, or a new one."""

import re
import uuid

from starlette.types import Scope

from octavo.entrypoints.errors import SchemaError

__all__ = ["checked_request_id", "request_id_of"]

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_HEADER = b"x-request-id"


def request_id_of(scope: Scope) -> str:
    """The same for every layer of the app that asks."""
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        stated = next((value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER), "")
        state["request_id"] = stated if _REQUEST_ID.fullmatch(stated) else uuid.uuid4().hex
    found: str = state["request_id"]
    return found


def checked_request_id(stated: str) -> str:
    """The id that a body states.

    Raises:
        SchemaError: it is not fit for logs and headers.
    """
    if not _REQUEST_ID.fullmatch(stated):
        raise SchemaError("request_id must be 1 to 128 visible ASCII characters", param="request_id")
    return stated
