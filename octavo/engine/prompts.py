"""The shapes in which a caller may give a prompt, and the words in which what is wrong with a request is told."""

from typing import Any, NoReturn, TypedDict

from octavo.errors import RequestError

__all__ = ["Prompt", "TextPrompt", "TokensPrompt", "check_unicode", "refuse", "shown", "split_prompt"]


class _Salted(TypedDict, total=False):
    cache_salt: str


class TextPrompt(_Salted):
    """A prompt as text."""

    prompt: str


class _Tokens(TypedDict):
    prompt_token_ids: list[int]


class TokensPrompt(_Tokens, _Salted, total=False):
    """A prompt as token ids. ``prompt`` may say what text they came from; it is only handed back."""

    prompt: str | None


Prompt = str | TextPrompt | TokensPrompt

_SHAPES = 'text, {"prompt": text} or {"prompt_token_ids": [token ids]}'
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


def split_prompt(prompt: Any) -> tuple[str | None, Any, Any]:
    """(text, token ids, cache salt) of a prompt in one of its shapes; ids and salt as they came, unchecked."""
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, dict):
        refuse("prompt", f"prompt must be {_SHAPES}; got {type(prompt).__name__}")
    for key in prompt:
        if key not in _KEYS:
            refuse("prompt", f"prompt has an unknown key {shown(key)}; known: {', '.join(_KEYS)}")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        refuse("prompt", f"prompt must be {_SHAPES}; its text is {type(text).__name__}")
    if text is None and token_ids is None:
        refuse("prompt", f"prompt must be {_SHAPES}; it has neither")
    return text, token_ids, prompt.get("cache_salt")


def check_unicode(name: str, text: str) -> None:
    """Refuses text that cannot be sent on: Python's strings, and JSON's, may hold half of a character."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        refuse(name, f"{name} is not valid Unicode text: a lone surrogate at character {error.start}")


def shown(value: Any) -> str:
    """A value for a message, cut to a bearable length."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**128 else "a very large integer"
    return text if len(text) <= 60 else text[:57] + "..."


def refuse(param: str, message: str) -> NoReturn:
    raise RequestError(message, param=param)
