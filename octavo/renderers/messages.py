"""Checks a chat's messages and copies them, so that a template sees plain data of its own."""

import re
from collections.abc import Callable
from typing import Any

from octavo.errors import RequestError

__all__ = ["check_text", "plain_messages", "plain_settings"]

_MAX_DEPTH = 32
# It stands between special tokens, and may be part of their names: no text that ends one and begins another.
_ROLE = re.compile(r"[\w.-]{1,64}")


def plain_messages(messages: Any, change: Callable[[str], str]) -> list[dict[str, Any]]:
    """A deep copy of ``messages`` in which every string went through ``change`` and text parts are one string.

    Raises:
        RequestError: (param ``messages``) they are not a non-empty list of objects with a ``role`` and a ``content`` of
            text, or hold something that is not JSON.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise _wrong("messages must be a list of at least one message")
    return [_message(message, f"messages[{index}]", change) for index, message in enumerate(messages)]


def _message(message: Any, where: str, change: Callable[[str], str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(f"{where} must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise _wrong(f"{where}.role must be a word such as user, assistant or system")
    content = _content(message.get("content"), f"{where}.content")
    if content is None and not message.get("tool_calls"):
        raise _wrong(f"{where}.content is missing; it must be a string or a list of text parts")
    # The role is part of what the template writes around a message, as in '<|' + role + '|>'.
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    return {"role": _plain_data(role, where, str), "content": _plain_data(content, where, change)} | {
        change(key): _plain_data(value, where, change) for key, value in rest.items()
    }


def _content(content: Any, where: str) -> str | None:
    """Text parts are joined by line breaks: templates of text models take strings."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _wrong(f"{where} must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = repr(kind)[:40] if kind is not None else "a part without a type"
            raise _wrong(f"{where}[{index}] is {shown}; this model takes text parts only")
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{where}[{index}].text must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def plain_settings(settings: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A deep copy of a template's variables in which every string went through ``change``.

    Raises:
        RequestError: (param ``documents`` or ``chat_template_kwargs``) one of them is not JSON data.
    """
    return {
        name: _plain_data(value, name, change, "documents" if name == "documents" else "chat_template_kwargs")
        for name, value in settings.items()
    }


def check_text(text: str, where: str, param: str = "messages") -> None:
    """Raises RequestError if a string is not text: JSON's strings, and Python's, may hold half of a character."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"{where} holds half of a surrogate pair, which is not text"
            raise RequestError(message, param=param) from error


def _plain_data(value: Any, where: str, change: Callable[[str], str], param: str = "messages", depth: int = 0) -> Any:
    """A deep copy of JSON data, with ``change`` applied to its strings and keys.

    Raises:
        RequestError: it is not JSON data, too deep, or not text.
    """
    if depth > _MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {_MAX_DEPTH} deep", param=param)
    if isinstance(value, str):
        check_text(value, where, param)
        return change(value)
    if isinstance(value, dict):
        return {change(str(key)): _plain_data(entry, where, change, param, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(entry, where, change, param, depth + 1) for entry in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise RequestError(f"{where} holds a {type(value).__name__}, which is not JSON data", param=param)


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="messages")
