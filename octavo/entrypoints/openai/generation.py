"""What completions and chats share: one HTTP request's prompts as engine requests, their outputs as one stream, and the
count of their tokens."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET

from octavo.entrypoints.openai.protocol import GenerationRequest
from octavo.entrypoints.openai.reasoning_tokens import ReasoningTokens
from octavo.entrypoints.openai.responses import CompletionTokenDetails, TokenDetails, Usage
from octavo.errors import RequestError
from octavo.types import MAX_CHOICES, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from octavo.engine import AsyncLLM, EngineInputs

__all__ = ["Answer", "TokenCount", "in_turn", "process_prompts"]

_T = TypeVar("_T")

# Makes ids unique in the engine, whatever ids clients choose.
_numbers = itertools.count()
# Each choice of each prompt has a copy of the parameters, and of its prompt. So many bytes and tokens may be in all
# copies of one HTTP request; the engine has the same bounds for each prompt.
_MOST_COPIED_BYTES = 1 << 26
_MOST_COPIED_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class Answer:
    """What a route gives back.

    Attributes:
        content: the body, or a stream's events.
        num_truncated: tokens that were cut from the prompts, because the request says so.
        token_count: of the request, as far as it has come.
        has_tables: of logprobs, so that it may be large.
        unread: names of fields that turned out to have no effect: variables that the chat template never reads.
    """

    content: msgspec.Struct | AsyncGenerator[bytes, None]
    num_truncated: int = 0
    unread: tuple[str, ...] = ()
    token_count: "TokenCount | None" = None
    has_tables: bool = False


async def process_prompts(
    engine: "AsyncLLM",
    prompts: list[Any],
    params: SamplingParams,
    request: GenerationRequest,
    request_id: str,
    arrival_time: float,
    *,
    default_max_tokens: int | None,
    add_special_tokens: bool = True,
) -> "list[EngineInputs]":
    """Checks and encodes all prompts. Nothing has been started when one of them is refused.

    Args:
        default_max_tokens: takes the place of ``params.max_tokens`` where that is None, but gives way to the model's
            length. None: as many as fit.
        add_special_tokens: see InputProcessor.

    Raises:
        RequestError: it says which prompt, where there are several.
    """
    if len(prompts) * params.n > MAX_CHOICES:
        message = (
            f"{len(prompts)} prompts with n = {params.n} are {len(prompts) * params.n} choices; at most {MAX_CHOICES}"
        )
        raise RequestError(message, param="n")
    limit = default_max_tokens if params.max_tokens is None else None
    if limit is not None and params.truncate_prompt_tokens == -1:  # leave room for it
        params.max_tokens = min(limit, engine.config.model.max_model_len - 1)
    found = []
    num_tokens = 0
    for index, prompt in enumerate(prompts):
        try:
            inputs = await engine.process_inputs(
                prompt,
                params,
                f"{request_id}-{next(_numbers)}",
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                arrival_time=arrival_time,
                add_special_tokens=add_special_tokens,
            )
        except RequestError as error:
            if len(prompts) == 1:
                raise
            raise type(error)(f"prompt {index}: {error}", param=error.param) from None
        if index == 0:
            _check_copied_parameters(inputs.params, len(prompts))
        num_tokens += len(inputs.prompt_token_ids)
        if params.n > 1 and num_tokens * params.n > _MOST_COPIED_TOKENS:
            message = f"the prompts have more than {_MOST_COPIED_TOKENS} tokens in all {params.n} choices; lower n"
            raise RequestError(message, param="n")
        if limit is not None:
            _limit_tokens(inputs, limit)
        found.append(inputs)
        await asyncio.sleep(0)  # short prompts are encoded on the loop: others have their turn in between
    return found


def _check_copied_parameters(params: SamplingParams, num_prompts: int) -> None:
    """Refuses lists of prompts whose parameters would take more memory than one request may. ``params`` are complete:
    the same for every prompt, but for numbers."""
    copies = num_prompts * params.n
    if num_prompts > 1 and (num_bytes := copies * len(msgspec.msgpack.encode(params))) > _MOST_COPIED_BYTES:
        message = (
            f"there are {copies} choices and the parameters take {num_bytes // copies} bytes, together {num_bytes}, "
            f"but at most {_MOST_COPIED_BYTES} are taken; send fewer prompts at once, or shorten the longest list"
        )
        raise RequestError(message, param="prompt")


def _limit_tokens(inputs: "EngineInputs", limit: int) -> None:
    """A request without ``max_tokens`` has got all the room that is left; it is to have less."""
    for params in (inputs.params, *(request.sampling_params for request in inputs.requests)):
        assert params.max_tokens is not None
        params.max_tokens = min(params.max_tokens, limit)


async def in_turn(form: Callable[[], _T], is_large: bool) -> _T:
    """What ``form`` makes of an output; the large in a thread, for the loop has others to serve: the tables of a
    thousand choices are half a minute's work."""
    return await asyncio.to_thread(form) if is_large else form()


class TokenCount:
    """Counts the tokens of one HTTP request, each once.

    Args:
        num_prompt_tokens: of all prompts together.
        reasoning: counts those that are reasoning; None: that is not told.
    """

    def __init__(self, num_prompt_tokens: int, reasoning: ReasoningTokens | None = None) -> None:
        self._prompt = num_prompt_tokens
        self._reasoning = reasoning
        self._completion = 0
        self._cached: dict[str, int] = {}  # by prompt's request id

    def add(self, output: RequestOutput) -> None:
        """Takes in an output whose token ids have not been counted before."""
        self._cached[output.request_id] = output.num_cached_tokens
        for choice in output.outputs:
            self._completion += len(choice.token_ids)
            if self._reasoning is not None:
                self._reasoning.add(output.request_id, choice.index, choice.token_ids)

    def usage(self) -> Usage:
        return Usage(
            self._prompt,
            self._completion,
            self._prompt + self._completion,
            TokenDetails(sum(self._cached.values())),
            UNSET if self._reasoning is None else CompletionTokenDetails(self._reasoning.count()),
        )
