"""Bodies of responses as msgspec structs: encoded by the thousand, so without pydantic. JSON never holds NaN or
Infinity: logprobs are bounded below."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "ChatTokenLogprob",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "ModelCard",
    "ModelList",
    "TokenDetails",
    "TopLogprob",
    "Usage",
    "encode",
    "event",
]

encode = msgspec.json.Encoder().encode


def event(body: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


class TokenDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts. Prompts count once, whatever ``n`` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, an entry a token. ``text_offset``: characters of the choice's text before the token."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Completion(msgspec.Struct, kw_only=True):
    """A whole completion, or a chunk of one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]


class ChatMessage(msgspec.Struct):
    """The reasoning goes by two names: clients know one or the other. Absent where the model is not split."""

    role: str
    content: str
    refusal: str | None = None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[Any] = []


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
