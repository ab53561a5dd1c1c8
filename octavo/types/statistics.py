"""What the engine's outputs come to, for whoever counts: a step's sums, and sequences and requests at their end."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.types.engine_io import FinishReason, RequestMetrics
from octavo.types.sampling_params import SamplingParams

__all__ = ["FinishedRequest", "FinishedSequence", "StepCounts"]


@dataclass(slots=True)
class StepCounts:
    """What one step gave to the callers, in sum.

    Attributes:
        num_prompt_tokens: of the prompts whose computation it completed.
        num_cached_tokens: how many of those the prefix cache supplied.
        num_generation_tokens: tokens that callers get.
        first_token_seconds: from a sequence's arrival to its first token.
        token_seconds: time a token since the one before → how many tokens took it.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    # Sequences that were in the same two steps have waited equally long: few entries for many tokens.
    token_seconds: dict[float, int] = field(default_factory=dict)


class FinishedSequence(NamedTuple):
    """One choice of a request, at its end.

    Attributes:
        max_tokens: what it might have generated at most.
        now: when the end was seen.
    """

    reason: FinishReason
    times: RequestMetrics
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    max_tokens: int
    now: float


class FinishedRequest(NamedTuple):
    """A request, at the end of its last choice.

    Attributes:
        num_generation_tokens: of each choice.
        finish_reasons: of each choice.
        error: why it failed, if it did.
        trace_parent: see RequestTracer.
        now: when the end was seen.
    """

    request_id: str
    params: SamplingParams
    times: RequestMetrics
    num_prompt_tokens: int
    num_generation_tokens: list[int]
    finish_reasons: list[str]
    error: str | None
    trace_parent: Any
    now: float
