"""What bodies of requests have in common, as pydantic models: fields and types, strictly. Ranges are checked by
SamplingParams and by the engine's InputProcessor, for all doors alike; what the API alone forbids is checked here."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octavo.entrypoints.errors import SchemaError
from octavo.errors import RequestError
from octavo.types import RequestOutputKind, SamplingParams

__all__ = [
    "GenerationRequest",
    "Integers",
    "Objects",
    "RequestBody",
    "StreamOptions",
    "Strings",
    "parse_request",
    "widest",
]

_MOST_STOPS = 4
# Fields that SamplingParams has under the same names, with the same meanings.
_SAMPLING_FIELDS = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "min_tokens", "prompt_logprobs", "logprob_token_ids", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "truncate_prompt_tokens"),
)
# Where the names differ: SamplingParams' → the API's.
_API_NAMES = {"extra_args": "vllm_xargs", "bad_words_token_ids": "bad_words"}

# Lists stop at their first wrong entry: a report of a million errors would be a gift to attackers.
Strings = Annotated[list[str], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
# SamplingParams looks at keys and values, and at how many there are first.
Biases = Annotated[dict[str, Any], Field(json_schema_extra={"additionalProperties": {"type": "number"}})]


class RequestBody(BaseModel):
    """A body; unknown fields are kept, so that they can be named."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    request_id: str | None = None

    def ignored_fields(self) -> list[str]:
        """Names of fields that have no effect.

        Raises:
            RequestError: a field asks for something that octavo does not do.
        """
        raise AssertionError("each kind of request names its own")


class StreamOptions(BaseModel):
    """What a stream tells beside the text."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(RequestBody):
    """What completions and chat completions have in common. None is the default everywhere."""

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Integers | None = None
    bad_words: Strings | None = None
    stop: str | Strings | None = None
    stop_token_ids: Integers | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Integers | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    vllm_xargs: dict[str, Any] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None

    def ignored_fields(self) -> list[str]:
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

    @property
    def has_logprobs(self) -> bool:
        """Whether a table is asked for, beside what each API has under the name of ``logprobs``."""
        return self.prompt_logprobs is not None or self.logprob_token_ids is not None

    def field_of(self, param: str | None) -> str | None:
        """The field of this API that a parameter of the engine came from."""
        return _API_NAMES.get(param or "", param)

    def in_own_words(self, error: RequestError) -> RequestError:
        """A refusal by the engine, with the field as this API calls it."""
        field, message = self.field_of(error.param), str(error)
        if error.param is not None and field is not None:
            message = message.replace(error.param, field, 1)
        return type(error)(message, param=field)

    def _checked(self) -> None:
        """Refuses what has no meaning in the API, though SamplingParams would take it."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs are given with a whole answer only; leave stream out"
            raise RequestError(message, param="prompt_logprobs")
        if isinstance(self.stop, list) and len(self.stop) > _MOST_STOPS:
            message = f"stop must be at most {_MOST_STOPS} strings, got {len(self.stop)}"
            raise RequestError(message, param="stop")

    def _sampling_params(self, defaults: dict[str, Any], **fields: Any) -> SamplingParams:
        """
        Args:
            defaults: values of what the request does not state.
            fields: those that are not taken over as they are.
        """
        self._checked()
        stated = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        values = defaults | {name: value for name, value in stated.items() if value is not None} | fields
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(output_kind=kind, extra_args=self.vllm_xargs or {}, **values)


def widest(*counts: int | None) -> int | None:
    """Of several numbers of logprobs the one that covers them all; None: none are wanted."""
    wanted = [count for count in counts if count is not None]
    if not wanted:
        return None
    return -1 if -1 in wanted else max(wanted)


_Request = TypeVar("_Request", bound=RequestBody)


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
