"""InputBatch: what the worker knows of the requests it holds, as arrays with a row for each request.

It lives across steps and is changed by increments. A row keeps its place from a request's first step to its last;
steps index the rows they need, so nothing ever moves. Knows nothing of torch.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.sample import LogitsProcessor, RequestChanges, RowChanges, SamplingMetadata, request_processors
from octavo.types import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput

__all__ = ["InputBatch"]

T = TypeVar("T")


class InputBatch:
    """Args:

    max_num_seqs: rows.
    max_model_len: tokens a row.
    vocab_size: width of the logits.
    block_sizes: tokens in a block, for each KV cache group.
    processors: custom logits processors.

    Attributes, all indexed by row:
        token_ids: [max_num_seqs, max_model_len] int32: the prompt, then every token sampled so far.
        num_tokens: how many of them are known. The worker's own count: it holds tokens that the scheduler, one step
            ahead, has only placeholders for.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: leading tokens whose KV is in the cache, as of the step being prepared.
        num_prompt_logprobs: so many are wanted for each token of the prompt; -1: none.
        block_tables: for each group [max_num_seqs, blocks of max_model_len] int32.
        special_rows: of requests that want more than a token each step: logprobs, changes of their logits.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        block_sizes: list[int],
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.row_of: dict[str, int] = {}
        self.special_rows: set[int] = set()
        self._last_req_ids: list[str] | None = None
        self._last_rows = np.empty(0, dtype=np.int64)
        self._vocab_size = vocab_size
        self._processors = processors
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_sizes = list(block_sizes)
        self.block_tables = [
            np.zeros((max_num_seqs, -(-max_model_len // size)), dtype=np.int32) for size in block_sizes
        ]
        self._num_blocks = np.zeros((len(block_sizes), max_num_seqs), dtype=np.int64)

        self.num_prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self._asking_for_prompt_logprobs: set[int] = set()
        self._temperature = np.zeros(max_num_seqs, dtype=np.float64)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float64)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float64)
        self._seed = np.zeros(max_num_seqs, dtype=np.int64)
        self._choice_index = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        # What the rows of the last batch that was sampled ask.
        self._sampled_rows: NDArray[np.int64] | None = None
        self._columns: list[NDArray[Any]] = []
        # Of the rows that have some.
        self._changes: dict[int, RequestChanges] = {}
        self._logprob_token_ids: dict[int, NDArray[np.int64]] = {}

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Brings the batch to the state in which the step begins."""
        self.begin(scheduler_output)
        self._update(scheduler_output.scheduled_cached_reqs)
        for request in scheduler_output.scheduled_new_reqs:
            self.add(request)

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """The part of ``apply`` that few steps have something to do in: requests go, blocks come."""
        for req_id in scheduler_output.finished_req_ids:
            self.remove(req_id)
        for req_id in scheduler_output.preempted_req_ids:
            self.remove(req_id)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                self._append_blocks(self.row_of[req_id], block_ids)

    def add(self, request: NewRequestData) -> None:
        """Takes in a request whole."""
        if request.req_id in self.row_of:
            raise ValueError(f"request {request.req_id!r} came as new, but the worker holds it already")
        row = self._free_rows.pop()
        self.row_of[request.req_id] = row
        count = len(request.token_ids)
        self.token_ids[row, :count] = request.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self._num_blocks[:, row] = 0
        self._append_blocks(row, request.block_ids)
        self._set_sampling(row, request)

    def remove(self, req_id: str) -> None:
        """Forgets a request. One that never reached the worker (aborted before its first step) is not an error."""
        row = self.row_of.pop(req_id, None)
        if row is not None:
            self._asking_for_prompt_logprobs.discard(row)
            self._changes.pop(row, None)
            self._logprob_token_ids.pop(row, None)
            self.special_rows.discard(row)
            self._free_rows.append(row)
            self._last_req_ids = None

    def rows(self, req_ids: list[str]) -> NDArray[np.int64]:
        """Rows of requests that the batch holds. Most steps are of the requests of the step before, and get the very
        same array: it is not to be written to."""
        if req_ids != self._last_req_ids:
            self._last_rows = np.array([self.row_of[req_id] for req_id in req_ids], dtype=np.int64)
            self._last_rows.flags.writeable = False
            self._last_req_ids = req_ids
        return self._last_rows

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """One sampled token for each of ``rows``."""
        ends = self.num_tokens[rows]
        self.token_ids[rows, ends] = token_ids
        self.num_tokens[rows] = ends + 1

    def sampling_columns(self) -> list[NDArray[Any]]:
        """What ``sampling_metadata`` is gathered from, [max_num_seqs] each: temperature, min_p, top_p, top_k, seed,
        choice_index, num_prompt_tokens."""
        columns = (self._temperature, self._min_p, self._top_p, self._top_k, self._seed, self._choice_index)
        return [*columns, self.num_prompt_tokens]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether any request asks for logprobs of its prompt."""
        return bool(self._asking_for_prompt_logprobs)

    def sampling_metadata(self, rows: NDArray[np.int64]) -> SamplingMetadata:
        """What ``rows`` ask of the sampler for their next token. A request's parameters never change: for the array
        that ``rows()`` gave the last time too, they are not gathered again."""
        if rows is not self._sampled_rows:
            columns = (self._temperature, self._min_p, self._top_k, self._top_p, self._seed, self._choice_index)
            self._sampled_rows = rows
            self._columns = [column[rows] for column in (*columns, self._num_logprobs, self.num_prompt_tokens)]
        temperature, min_p, top_k, top_p, seed, choice_index, num_logprobs, num_prompt_tokens = self._columns
        return SamplingMetadata(
            temperature=temperature,
            min_p=min_p,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            choice_index=choice_index,
            output_position=self.num_tokens[rows] - num_prompt_tokens,
            num_logprobs=num_logprobs,
            logprob_token_ids=_of_rows(self._logprob_token_ids, rows),
            changes=self._row_changes(rows),
        )

    def _row_changes(self, rows: NDArray[np.int64]) -> dict[int, RowChanges]:
        """Index into ``rows`` → how that row's logits are changed for its next token."""
        found: dict[int, RowChanges] = {}
        for index, changes in _of_rows(self._changes, rows).items():
            row = rows[index]
            now = changes.row(self.token_ids[row, : self.num_tokens[row]], int(self.num_prompt_tokens[row]))
            if now is not None:
                found[index] = now
        return found

    def _update(self, cached: CachedRequestData) -> None:
        if not cached.req_ids:
            return
        rows = self.rows(cached.req_ids)
        self.num_computed_tokens[rows] = cached.num_computed_tokens
        # Fewer outputs than are held here: the scheduler has taken tokens back. More: one in flight failed.
        counted = self.num_prompt_tokens[rows] + cached.num_output_tokens
        self.num_tokens[rows] = np.minimum(self.num_tokens[rows], counted)

    def _append_blocks(self, row: int, block_ids: BlockIds) -> None:
        for group, new in enumerate(block_ids):
            start = self._num_blocks[group, row]
            self.block_tables[group][row, start : start + len(new)] = new
            self._num_blocks[group, row] = start + len(new)

    def _set_sampling(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        if params.seed is None:
            raise ValueError("sampling_params.seed must be set before a request reaches the worker")
        self._temperature[row] = 0.0 if params.greedy else params.temperature
        self._min_p[row] = params.min_p
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._seed[row] = params.seed
        self._choice_index[row] = request.choice_index
        self._num_logprobs[row] = self._listed(params.logprobs)
        self.num_prompt_logprobs[row] = self._listed(params.prompt_logprobs)
        if params.prompt_logprobs is not None:
            self._asking_for_prompt_logprobs.add(row)
        if params.logprob_token_ids is not None:
            self._num_logprobs[row] = 0
            self._logprob_token_ids[row] = np.array(params.logprob_token_ids, dtype=np.int64)
        processors = request_processors(self._processors, params, request.token_ids[: request.num_prompt_tokens])
        if processors or RequestChanges.used_by(params):
            self._changes[row] = RequestChanges(params, request.eos_token_ids, self._vocab_size, processors)
        if params.prompt_logprobs is not None or self._num_logprobs[row] >= 0 or row in self._changes:
            self.special_rows.add(row)

    def _listed(self, num_logprobs: int | None) -> int:
        """How many logprobs are listed; -1: not even the token's own. (In parameters, -1 is the whole vocabulary.)"""
        if num_logprobs is None:
            return -1
        return self._vocab_size if num_logprobs == -1 else num_logprobs


def _of_rows(entries: dict[int, T], rows: NDArray[np.int64]) -> dict[int, T]:
    """Index into ``rows`` → its entry, where it has one."""
    if not entries:
        return {}
    return {index: entries[row] for index, row in enumerate(rows.tolist()) if row in entries}
