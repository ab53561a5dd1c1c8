"""Bodies of POST /tokenize (a text, or a chat) and POST /detokenize."""

from typing import Any

from octavo.entrypoints.openai.protocol import Integers, Objects, RequestBody, parse_request
from octavo.entrypoints.openai.unsupported import CHAT_ONLY, refuse_unsupported
from octavo.errors import RequestError

__all__ = [
    "DetokenizeRequest",
    "TokenizeChatRequest",
    "TokenizeCompletionRequest",
    "parse_tokenize_request",
]


class TokenizeCompletionRequest(RequestBody):
    """A text."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def ignored_fields(self) -> list[str]:
        return list(self.model_extra or {})


class TokenizeChatRequest(RequestBody):
    """A conversation, as it would be rendered for an answer."""

    messages: Objects
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    return_token_strs: bool | None = None

    def ignored_fields(self) -> list[str]:
        return refuse_unsupported(self.model_extra or {}, CHAT_ONLY)


class DetokenizeRequest(RequestBody):
    """Token ids."""

    tokens: Integers

    def ignored_fields(self) -> list[str]:
        return list(self.model_extra or {})


def parse_tokenize_request(body: dict[str, Any]) -> TokenizeCompletionRequest | TokenizeChatRequest:
    """The body in that of two forms which its fields show.

    Raises:
        RequestError: it is of neither, or of both.
    """
    if "messages" not in body:
        return parse_request(TokenizeCompletionRequest, body)
    if body.get("prompt") is not None:
        raise RequestError("give a prompt or messages, not both", param="prompt")
    return parse_request(TokenizeChatRequest, {name: value for name, value in body.items() if name != "prompt"})
