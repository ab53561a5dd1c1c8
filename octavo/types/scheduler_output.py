"""The contract between brain and muscle: what the scheduler tells the workers, and what they answer.

Everything here survives msgpack, so that no side ever relies on sharing objects with the other. The worker keeps a
persistent InputBatch: new requests come whole, running ones as increments.
"""

import msgspec

from octavo.types.engine_io import PositionLogprobs
from octavo.types.sampling_params import SamplingParams

__all__ = ["BlockIds", "CachedRequestData", "ModelRunnerOutput", "NewRequestData", "PromptLogprobs", "SchedulerOutput"]

# Block ids of one request, a list for each KV cache group.
BlockIds = tuple[list[int], ...]


class NewRequestData(msgspec.Struct, array_like=True, omit_defaults=True):
    """A request that the worker does not hold: a new one, or one that was preempted and starts again.

    Attributes:
        token_ids: prompt, then what was generated before a preemption.
        num_prompt_tokens: how many of them are the prompt.
        sampling_params: with seed and max_tokens set.
        eos_token_ids: end-of-sequence ids (for min_tokens).
        choice_index: part of the random number key.
        block_ids: all blocks of the request, prefix-cache hits included.
        num_computed_tokens: leading tokens whose KV is in those blocks.
    """

    req_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: list[int]
    choice_index: int
    block_ids: BlockIds
    num_computed_tokens: int


class CachedRequestData(msgspec.Struct, array_like=True):
    """Increments for requests that the worker holds; all lists run parallel to ``req_ids``.

    Attributes:
        new_block_ids: blocks appended since the last step; None: none were.
        num_computed_tokens: leading tokens that are computed when this step begins.
        num_output_tokens: generated tokens that the scheduler counts when this step begins, tokens still in flight
            included. The worker holds the sampled ids itself; a smaller number than it holds is a rollback.
    """

    req_ids: list[str]
    new_block_ids: list[BlockIds | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]

    @classmethod
    def empty(cls) -> "CachedRequestData":
        return cls(req_ids=[], new_block_ids=[], num_computed_tokens=[], num_output_tokens=[])


class SchedulerOutput(msgspec.Struct, array_like=True):
    """One step.

    Attributes:
        step: counts from 1.
        scheduled_new_reqs: requests that enter the batch.
        scheduled_cached_reqs: requests that are in the batch.
        num_scheduled_tokens: request id → tokens to compute in this step (≥ 1).
        total_num_scheduled_tokens: their sum, at most max_num_batched_tokens.
        finished_req_ids: requests that ended since the last step, however; the worker forgets them. Applied before
            the new ones, so that an id may be used again.
        preempted_req_ids: requests that lost their blocks; the worker forgets them too, they come back as new. Applied
            before the new ones as well: a request may be preempted and come back between two steps.
    """

    step: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: list[str]
    preempted_req_ids: list[str]


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of a part of a prompt: ``entries[i]`` is that of the prompt's token at position ``start + i`` (≥ 1)."""

    start: int
    entries: list[PositionLogprobs]


class ModelRunnerOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What a step produced. All lists run parallel to ``req_ids`` (the step's scheduled requests).

    Attributes:
        sampled_token_ids: 0 tokens (a prompt not yet computed to its end) to k+1 tokens each.
        logprobs: for requests that asked: one entry a sampled token; else None.
        errors: request id → why this request cannot go on (for example NaN logits); its tokens are not to be used.
        prompt_logprobs: request id → logprobs of the prompt's tokens that follow the ones computed in this step, for
            requests that asked.
        graph_mode: how the forward ran: ``"EAGER"``, ``"PIECEWISE"`` or ``"FULL"``.
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: list[list[PositionLogprobs] | None]
    errors: dict[str, str] = {}
    graph_mode: str = "EAGER"
    prompt_logprobs: dict[str, PromptLogprobs] = {}
