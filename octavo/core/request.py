"""Request: one sequence as the scheduler knows it, and the states it goes through.

WAITING ──▶ RUNNING ──▶ FINISHED      (WAITING and PREEMPTED may finish, too: by an abort)
             │    ▲
             ▼    │
           PREEMPTED
"""

from enum import Enum

from octavo.core.kv_cache import hash_block, hash_extra_keys
from octavo.types import EngineCoreRequest, FinishReason, PositionLogprobs, PromptLogprobs, RequestMetrics

__all__ = ["Request", "RequestStatus"]

# The step of entry of a request that isn't in the batch: no step's results are its own.
_NOT_IN_BATCH = 2**63


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


_MOVES = {
    (RequestStatus.WAITING, RequestStatus.RUNNING),
    (RequestStatus.PREEMPTED, RequestStatus.RUNNING),
    (RequestStatus.RUNNING, RequestStatus.PREEMPTED),
    (RequestStatus.WAITING, RequestStatus.FINISHED),
    (RequestStatus.RUNNING, RequestStatus.FINISHED),
    (RequestStatus.PREEMPTED, RequestStatus.FINISHED),
}


class Request:
    """Args:

    request: as it came from the front end.
    max_model_len: longest sequence, tokens.
    block_size: tokens in a block, for the hashes.
    hash_key: from ``hash_root_key``.
    order: counts requests as they arrive; breaks ties.

    Attributes:
        token_ids: prompt and output; all that is known.
        num_prompt_tokens: how many of them are the prompt.
        max_total_tokens: length at which the request ends, whatever is generated.
        num_computed_tokens: leading tokens computed once all steps scheduled so far are done.
        num_settled_tokens: the same for the steps whose results are in.
        num_output_placeholders: tokens that are being sampled in steps in flight.
        entry_step: step in which it entered the batch, last time.
        num_cached_tokens: what the prefix cache supplied when it first entered (None: it never did).
        num_hit_tokens: the same for the last time.
        next_prompt_logprob: first position of the prompt whose logprobs are still to be delivered; where none are,
            ``num_prompt_tokens``.
        sort_key: lower goes first under the priority policy.
    """

    __slots__ = (
        "_block_size",
        "_ending_ids",
        "_eos_token_ids",
        "_extra_keys",
        "_hash_key",
        "_min_tokens",
        "block_hashes",
        "client_index",
        "core_request",
        "entry_step",
        "finish_reason",
        "max_total_tokens",
        "metrics",
        "next_prompt_logprob",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hit_tokens",
        "num_output_placeholders",
        "num_prompt_tokens",
        "num_settled_tokens",
        "request_id",
        "sort_key",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self, request: EngineCoreRequest, max_model_len: int, block_size: int, hash_key: bytes, order: int
    ) -> None:
        params = request.sampling_params
        self.core_request = request
        self.request_id = request.request_id
        self.client_index = request.client_index
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        longest = max_model_len if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        self.max_total_tokens = min(longest, max_model_len)
        self.sort_key = (request.priority, request.arrival_time, order)

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.num_computed_tokens = 0
        self.num_settled_tokens = 0
        self.num_output_placeholders = 0
        self.entry_step = _NOT_IN_BATCH
        self.num_cached_tokens: int | None = None
        self.num_hit_tokens = 0
        self.next_prompt_logprob = self.num_prompt_tokens if params.prompt_logprobs is None else 1
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)

        self.block_hashes: list[bytes] = []
        self._block_size = block_size
        self._hash_key = hash_key
        self._extra_keys = hash_extra_keys(request.cache_salt)
        self._eos_token_ids = frozenset(request.eos_token_ids)
        self._ending_ids = self._eos_token_ids.union(params.stop_token_ids)
        self._min_tokens = params.min_tokens

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether some of the prompt's logprobs are still to be delivered: all of the prompt must be computed for it,
        so that nothing may come from the prefix cache."""
        return self.next_prompt_logprob < self.num_prompt_tokens

    def enter(self, step: int, num_hit_tokens: int, now: float) -> None:
        """Into the batch, beginning with what the prefix cache supplies."""
        self._move_to(RequestStatus.RUNNING)
        self.entry_step = step
        self.num_computed_tokens = self.num_settled_tokens = self.num_hit_tokens = num_hit_tokens
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_hit_tokens
            self.metrics.scheduled_time = now

    def preempt(self) -> None:
        """Out of the batch: nothing is computed any more, and what is in flight isn't its own."""
        self._move_to(RequestStatus.PREEMPTED)
        self.entry_step = _NOT_IN_BATCH
        self.num_computed_tokens = self.num_settled_tokens = self.num_output_placeholders = 0
        self.metrics.num_preemptions += 1

    def finish(self, reason: FinishReason) -> None:
        """The end, for whatever reason."""
        self._move_to(RequestStatus.FINISHED)
        self.finish_reason = reason

    def append_tokens(self, token_ids: list[int]) -> tuple[int, FinishReason | None]:
        """Takes sampled tokens up to the one that ends the request, if one does.

        Returns:
            How many were taken, and why the request ends with them.
        """
        known = self.token_ids
        for count, token_id in enumerate(token_ids, 1):
            known.append(token_id)
            if token_id in self._ending_ids and len(known) - self.num_prompt_tokens >= self._min_tokens:
                self.stop_reason = None if token_id in self._eos_token_ids else token_id
                return count, FinishReason.STOP
            if len(known) >= self.max_total_tokens:
                return count, FinishReason.LENGTH
        return len(token_ids), None

    def take_prompt_logprobs(self, part: PromptLogprobs) -> list[PositionLogprobs]:
        """What is new in ``part``: after a preemption, positions that have been delivered are computed again."""
        if part.start > self.next_prompt_logprob:
            raise RuntimeError(f"{self}: prompt logprobs from {self.next_prompt_logprob} to {part.start} never came")
        new = part.entries[self.next_prompt_logprob - part.start :]
        self.next_prompt_logprob += len(new)
        return new

    def extend_block_hashes(self) -> None:
        """Brings ``block_hashes`` up to all full blocks of known tokens."""
        hashes, size = self.block_hashes, self._block_size
        parent = hashes[-1] if hashes else b""
        for end in range((len(hashes) + 1) * size, len(self.token_ids) + 1, size):
            parent = hash_block(parent, self.token_ids[end - size : end], self._extra_keys, self._hash_key)
            hashes.append(parent)

    def _move_to(self, status: RequestStatus) -> None:
        if (self.status, status) not in _MOVES:
            raise RuntimeError(f"request {self.request_id!r} cannot go from {self.status.name} to {status.name}")
        self.status = status
