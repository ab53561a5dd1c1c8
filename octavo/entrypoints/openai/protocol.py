"""Bodies of requests as pydantic models: fields and types, strictly. Ranges are checked by SamplingParams and by the
engine's InputProcessor, for all doors alike; what depends on the transport alone is checked here."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octavo.entrypoints.errors import SchemaError
from octavo.entrypoints.openai.unsupported import CHAT_ONLY, COMMON, COMPLETION_ONLY, refuse_unsupported
from octavo.errors import RequestError
from octavo.types import RequestOutputKind, SamplingParams

__all__ = [
    "COMPLETION_MAX_TOKENS",
    "ChatCompletionRequest",
    "CompletionRequest",
    "GenerationRequest",
    "StreamOptions",
    "parse_request",
]

_MOST_STOPS = 4
# What a completion without max_tokens may have, if the model's length leaves so much.
COMPLETION_MAX_TOKENS = 16
_SAMPLING_FIELDS = ("n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens")
_RESERVED_VARIABLES = ("messages", "chat_template", "add_generation_prompt", "tools", "documents", "tokenize")

# Lists stop at their first wrong entry: a report of a million errors would be a gift to attackers.
Strings = Annotated[list[str], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(_Strict):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Strict):
    """What completions and chat completions have in common. None is the default everywhere."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Integers | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None

    def ignored_fields(self) -> list[str]:
        """Names of fields that have no effect."""
        options = self.stream_options
        nested = [] if options is None else [f"stream_options.{name}" for name in options.model_extra or {}]
        return self._unknown_fields() + nested

    def _unknown_fields(self) -> list[str]:
        raise AssertionError("each request names its own")

    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream has the token counts so far."""
        return self.include_usage() and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def _checked(self) -> None:
        """Refuses what has no meaning in the API, though SamplingParams would take it."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if isinstance(self.stop, list) and len(self.stop) > _MOST_STOPS:
            message = f"stop must be at most {_MOST_STOPS} strings, got {len(self.stop)}"
            raise RequestError(message, param="stop")

    def _sampling_params(self, **fields: Any) -> SamplingParams:
        self._checked()
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(output_kind=kind, **fields)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions. ``prompt`` is checked entry by entry when the prompts are prepared."""

    prompt: str | list[Any] | None = None
    logprobs: int | None = None

    def _unknown_fields(self) -> list[str]:
        return refuse_unsupported(self.model_extra or {}, COMMON | COMPLETION_ONLY)

    def sampling_params(self) -> SamplingParams:
        """Without ``max_tokens`` it has none: how much of the default fits is known with the prompt."""
        max_tokens = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        params = self._sampling_params(max_tokens=max_tokens, logprobs=self.logprobs)
        params.max_tokens = self.max_tokens
        return params


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions. What messages may look like is the chat template's matter."""

    messages: Objects
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def _unknown_fields(self) -> list[str]:
        return refuse_unsupported(self.model_extra or {}, COMMON | CHAT_ONLY)

    def sampling_params(self) -> SamplingParams:
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling_params(max_tokens=max_tokens, logprobs=logprobs)

    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages in the form that templates are written for: earlier reasoning under its older name."""
        return [
            {**message, "reasoning_content": message["reasoning"]}
            if "reasoning" in message and "reasoning_content" not in message
            else message
            for message in self.messages
        ]

    def template_kwargs(self) -> dict[str, Any] | None:
        """Variables for the chat template, such as ``enable_thinking``.

        Raises:
            RequestError: one of them is not the client's to set.
        """
        for name in _RESERVED_VARIABLES:
            if name in (self.chat_template_kwargs or {}):
                raise RequestError(f"chat_template_kwargs must not set {name}", param="chat_template_kwargs")
        return self.chat_template_kwargs

    def field_of(self, param: str | None) -> str | None:
        """The field of this API that a parameter of the engine came from."""
        if param == "logprobs":
            return "top_logprobs"
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return param


_Request = TypeVar("_Request", bound=GenerationRequest)


def parse_request(kind: type[_Request], body: dict[str, Any]) -> _Request:
    """The body as a request of this kind.

    Raises:
        SchemaError: a field is missing or of a wrong type; it names the first such field.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        field = faults[0]["loc"][0]
        # Several faults of one field: it may have one of several types, and is of none of them.
        faults = [fault for fault in faults if fault["loc"][0] == field]
        where = ".".join(str(step) for step in faults[0]["loc"]) if len(faults) == 1 else str(field)
        messages = dict.fromkeys(fault["msg"][:1].lower() + fault["msg"][1:] for fault in faults)
        raise SchemaError(f"{where[:120]}: {', or '.join(messages)}", param=str(field)) from None
