"""The outermost layer of the app: every request has an id, every answer says it, and when it has ended a line is
logged. Nothing that a client sends can forge a line or a field of one.
"""

import re
import time
from collections.abc import Awaitable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config import LogsConfig
from octavo.entrypoints.answer_response import CLIENT_CLOSED_REQUEST
from octavo.entrypoints.request_ids import request_id_of
from octavo.logging import init_logger

__all__ = ["AccessLog"]

logger = init_logger("octavo.access")

_INTERNAL_SERVER_ERROR = 500
_LONGEST_PATH = 256
_LONGEST_NAME = 64
_NOT_SHOWN = re.compile(r"[^!#-\[\]-~]")  # control characters, what separates fields, and what is not ASCII


class AccessLog:
    """ASGI middleware. What other layers leave in the scope's state is logged, too: ``api_key_name``,
    ``token_count`` (see TokenCount), and ``stream_error``: the status that would have told of what a stream ended with.

    Args:
        app: what is behind it.
        config: what is logged.
    """

    def __init__(self, app: ASGIApp, config: LogsConfig) -> None:
        self._app = app
        self._silent = config.disable_uvicorn_access_log
        self._silent_paths = frozenset((config.disable_access_log_for_endpoints or "").split(","))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id_of(scope)
        began = time.monotonic()
        status, first_byte, complete = 0, 0.0, False

        def send_seen(message: Message) -> Awaitable[None]:  # not async: it is called for every token of a stream
            nonlocal status, first_byte, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message = _with_id(message, scope)
            else:
                if not first_byte:
                    first_byte = time.monotonic()
                complete = not message.get("more_body")
            return send(message)

        try:
            await self._app(scope, receive, send_seen)
        finally:
            if not self._silent and scope["path"] not in self._silent_paths:
                if not complete:
                    status = CLIENT_CLOSED_REQUEST if status else _INTERNAL_SERVER_ERROR
                _log(scope, status, began, first_byte)


def _with_id(message: Message, scope: Scope) -> Message:
    headers = list(message.get("headers", ()))
    if any(name == b"x-request-id" for name, _ in headers):
        return message
    return {**message, "headers": [*headers, (b"x-request-id", request_id_of(scope).encode())]}


def _log(scope: Scope, status: int, began: float, first_byte: float) -> None:
    state = scope["state"]
    client = scope.get("client")
    count = state.get("token_count")
    usage = None if count is None else count.usage()
    fields: dict[str, Any] = {
        "client": _shown(_address(*client), _LONGEST_NAME) if client else "-",
        "method": _shown(scope["method"], _LONGEST_NAME),
        "path": _shown(scope.get("raw_path", b"").decode("latin-1") or scope["path"], _LONGEST_PATH),
        "status": status,
        "request_id": request_id_of(scope),
        "seconds": round(time.monotonic() - began, 4),
    }
    if "stream_error" in state:
        fields["stream_error"] = state["stream_error"]
    if "api_key_name" in state:
        fields["key"] = _shown(state["api_key_name"], _LONGEST_NAME)
    if first_byte:
        fields["first_byte_seconds"] = round(first_byte - began, 4)
    if usage is not None:
        fields |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    named = " ".join(f"{name}={value}" for name, value in list(fields.items())[4:])
    line = f'{fields["client"]} "{fields["method"]} {fields["path"]}" {status} {named}'
    logger.info("%s", line, extra={"fields": fields})


def _address(host: str, port: int) -> str:
    return f"{host}:{port}" if port else host  # a proxy does not say the port


def _shown(text: str, most: int) -> str:
    return _NOT_SHOWN.sub("?", text if len(text) <= most else text[:most] + "...")
