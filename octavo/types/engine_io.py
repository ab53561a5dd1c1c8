"""The contract between the doors and the engine: everything that crosses the ZMQ sockets, as msgspec structs.

Front end → engine: a frame pair ``[EngineCoreRequestType, msgpack payload]``. Engine → front end: one msgpack frame
holding an EngineOutput. Times are seconds of ``time.monotonic()``, which all processes of a machine share.
"""

from enum import Enum, IntEnum
from typing import Any

import msgspec

from octavo.types.sampling_params import SamplingParams

__all__ = [
    "NO_TOKEN_LEFT",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineCoreRequestType",
    "EngineCoreRequests",
    "EngineDead",
    "EngineOutput",
    "EngineProgress",
    "EngineReady",
    "FinishReason",
    "PositionLogprobs",
    "Refusal",
    "RequestMetrics",
    "SchedulerStats",
    "UtilityRequest",
    "UtilityResult",
]


class FinishReason(IntEnum):
    """Why a request ended. ``str()`` gives the OpenAI name."""

    STOP = 0  # end of sequence, a stop token or a stop string
    LENGTH = 1  # max_tokens or max_model_len
    ABORT = 2  # the client went away or asked for it
    ERROR = 3  # the engine could not go on with it; EngineCoreOutput.error says why

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequestType(Enum):
    """First frame of a message to the engine."""

    ADD = b"\x00"  # payload: EngineCoreRequests
    ABORT = b"\x01"  # payload: list[str] of request ids
    UTILITY = b"\x02"  # payload: UtilityRequest


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """One sequence to generate. A request with n > 1 is n of these, with choice_index 0 to n-1.

    Attributes:
        request_id: unique in the engine.
        prompt_token_ids: at least one id, all below the vocabulary size.
        sampling_params: checked; ``seed`` and ``max_tokens`` are never None here.
        eos_token_ids: the model's end-of-sequence ids (empty when ``ignore_eos``).
        arrival_time: seconds.
        priority: lower goes first under the priority policy.
        cache_salt: keeps the request's prefix-cache entries apart from those with another salt.
        choice_index: part of the random number key.
        client_index: which front end gets the output.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int]
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    choice_index: int = 0
    client_index: int = 0


class EngineCoreRequests(msgspec.Struct, array_like=True):
    """What one request of a caller's is made of, all from one front end: the engine takes all of them or none."""

    requests: list[EngineCoreRequest]


class PositionLogprobs(msgspec.Struct, array_like=True, omit_defaults=True):
    """Logprobs at one generated position.

    Attributes:
        token_ids: the sampled id first, then the most likely ids in descending order (it may stand twice).
        logprobs: natural logarithms of the raw distribution, one for each of ``token_ids``.
        sampled_rank: rank of the sampled id, 1 = most likely; ties count lower ids first.
        ranks: with ``logprob_token_ids``, the rank of each of ``token_ids`` but the first, which then are those that
            were asked for; else empty: they are 1, 2, 3, ….

    For a position of the prompt, "sampled" is the prompt's own token.
    """

    token_ids: list[int]
    logprobs: list[float]
    sampled_rank: int
    ranks: list[int] = []


class RequestMetrics(msgspec.Struct, array_like=True, omit_defaults=True):
    """Times of one request, seconds of time.monotonic(); 0.0 = has not happened."""

    arrival_time: float = 0.0
    queued_time: float = 0.0
    scheduled_time: float = 0.0  # first time in a step
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    num_preemptions: int = 0


class Refusal(msgspec.Struct, array_like=True, omit_defaults=True):
    """Why a request was not let in: it cannot be served as it is; or not now.

    Attributes:
        param: name of the field at fault.
        retry_after: seconds after which it may be let in; 0: never.
        limit: name of the setting that would be exceeded, where one would.
    """

    param: str | None = None
    retry_after: int = 0
    limit: str | None = None


# The error of a request whose own parameters left it no token: not ours, but the client's mistake.
NO_TOKEN_LEFT = (
    "no token is left that may come next: allowed_token_ids, bad_words, min_tokens and custom logits processors "
    "together forbid them all; loosen one of them"
)


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step added to one request.

    Attributes:
        new_token_ids: 0 to k+1 tokens.
        new_logprobs: one entry a new token, where asked for.
        finish_reason: set on the request's last output.
        stop_reason: the stop token id that ended it; None for end of sequence.
        num_cached_tokens: prompt tokens supplied by the prefix cache.
        error: with FinishReason.ERROR, what happened.
        metrics: on the last output.
        refusal: the error is the scheduler's refusal to let the request in.
        new_prompt_logprobs: the next positions of the prompt, from position 1 on, each exactly once. All have come when
            the first token comes.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    metrics: RequestMetrics | None = None
    refusal: Refusal | None = None
    new_prompt_logprobs: list[PositionLogprobs] | None = None


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True):
    """State of the scheduler after a step. Counts named ``*_total`` only grow."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of blocks in use, 0 to 1
    prefix_cache_queries_total: int = 0  # tokens looked up
    prefix_cache_hits_total: int = 0  # tokens found
    preemptions_total: int = 0
    step_tokens: int = 0  # tokens computed in this step
    step_seconds: float = 0.0  # from its launch to its results
    prompt_tokens_total: int = 0  # of sequences whose prompt is computed
    generation_tokens_total: int = 0


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """One step's outputs for one front end."""

    outputs: list[EngineCoreOutput]
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    engine_index: int = 0


class UtilityRequest(msgspec.Struct, array_like=True):
    """A call of a method of EngineCore that is on the written list, answered by a UtilityResult."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


class UtilityResult(msgspec.Struct, array_like=True, tag=True):
    """Answer to a UtilityRequest: a result, or the error's message."""

    call_id: int
    result: Any = None
    error: str | None = None


class EngineProgress(msgspec.Struct, array_like=True, tag=True):
    """Where the engine is in loading; ``share`` from 0 to 1, of this stage."""

    stage: str
    share: float = 0.0


class EngineReady(msgspec.Struct, array_like=True, tag=True):
    """The model is loaded. The values are final: they may be lower than what the front end derived.

    Attributes:
        max_model_len: tokens.
        num_kv_blocks: usable blocks.
        block_size: tokens.
        load_seconds: from the start of the process.
    """

    max_model_len: int
    num_kv_blocks: int
    block_size: int
    load_seconds: float


class EngineDead(msgspec.Struct, array_like=True, tag=True):
    """Last words of an engine. ``exit_code`` 1: configuration or model at fault, 2: a flag, 3: it died."""

    cause: str
    exit_code: int


EngineOutput = EngineCoreOutputs | UtilityResult | EngineProgress | EngineReady | EngineDead
