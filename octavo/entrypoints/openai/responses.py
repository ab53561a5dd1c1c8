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
    "ChunkEvents",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "Detokenized",
    "ModelCard",
    "ModelList",
    "PromptLogprob",
    "TextEvents",
    "TokenDetails",
    "Tokenized",
    "TopLogprob",
    "Usage",
    "encode",
    "encode_in_pieces",
]

encode = msgspec.json.Encoder().encode
_SLICE = 1 << 14


def encode_in_pieces(body: Any) -> bytes:
    """``encode`` for an answer of any size. The encoder lets nothing else go on, in whatever thread it works: it gets a
    piece at a time."""
    if isinstance(body, msgspec.Struct) and type(body).__struct_config__.gc:
        stated = {name: value for name in body.__struct_fields__ if (value := getattr(body, name)) is not UNSET}
        parts = [b'"%b":%b' % (name.encode(), encode_in_pieces(value)) for name, value in stated.items()]
        return b"{" + b",".join(parts) + b"}"
    if isinstance(body, list):
        slices = [body[begin : begin + _SLICE] for begin in range(0, len(body), _SLICE)]
        if body and isinstance(body[-1], int | float | str):
            return b"[" + b",".join([encode(entries)[1:-1] for entries in slices]) + b"]"
        return b"[" + b",".join([encode_in_pieces(entry) for entries in slices for entry in entries]) + b"]"
    return encode(body)


class ChunkEvents:
    """The server-sent events of one stream: chunks that differ in their choices and counts. All else is encoded once.

    Args:
        chunk: without choices and usage.
    """

    def __init__(self, chunk: "Completion | ChatChunk") -> None:
        # In a JSON string the quotes would be escaped: this is the field.
        head, _, tail = encode(chunk).partition(b'"choices":[]')
        self._head = b"data: " + head + b'"choices":'
        self._tail = tail + b"\n\n"

    def encode(self, choices: "list[CompletionChoice] | list[ChatChunkChoice]", usage: "Usage | None" = None) -> bytes:
        if usage is None:
            return self._head + encode(choices) + self._tail
        return self._head + encode(choices) + b',"usage":' + encode(usage) + self._tail

    def of_text(self, choice: "CompletionChoice | ChatChunkChoice") -> "TextEvents":
        """The events in which nothing but a choice's text differs.

        Args:
            choice: its text is "", and nothing else in it is.
        """
        head, _, tail = encode([choice]).partition(b'""')
        return TextEvents(self._head + head, tail + self._tail)


class TextEvents:
    """The server-sent events of one choice's text: all around it is encoded already."""

    def __init__(self, head: bytes, tail: bytes) -> None:
        self._head = head
        self._tail = tail

    def encode(self, text: str) -> bytes:
        return self._head + encode(text) + self._tail


class TokenDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokenDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts. Prompts count once, whatever ``n`` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails
    completion_tokens_details: CompletionTokenDetails | UnsetType = UNSET


# An answer may have a million of these: the garbage collector, which would stop everything to look at them, need not
# know of them, for they hold nothing that leads back to them.
class PromptLogprob(msgspec.Struct, gc=False):
    logprob: float
    rank: int | None
    decoded_token: str | None


# An entry a token of a prompt: token id → what is known of it. The first token has none.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, an entry a token. ``text_offset``: characters of the choice's text before the token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def extend(self, other: "CompletionLogprobs") -> None:
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(other, name))


class CompletionChoice(msgspec.Struct):
    """The last three are there where they were asked for; of a stream, the prompt's in a choice's first chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole completion, or a chunk of one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    prompt_truncated_tokens: int | UnsetType = UNSET


class TopLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatTokenLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...]
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
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The last three are there where they were asked for, or where it happened."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_truncated_tokens: int | UnsetType = UNSET


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
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_truncated_tokens: int | UnsetType = UNSET


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


class Tokenized(msgspec.Struct):
    """``token_strs``: the tokens as the vocabulary spells them, where asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str
