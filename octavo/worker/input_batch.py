"""InputBatch: what the worker knows of the requests it holds, as arrays with a row for each request.

It lives across steps and is changed by increments. A row keeps its place from a request's first step to its last;
steps index the rows they need, so nothing ever moves. Knows nothing of torch.
"""

import numpy as np
from numpy.typing import NDArray

from octavo.sample import SamplingMetadata
from octavo.types import BlockIds, CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput

__all__ = ["InputBatch"]


class InputBatch:
    """Args:

    max_num_seqs: rows.
    max_model_len: tokens a row.
    vocab_size: width of the logits.
    block_sizes: tokens in a block, for each KV cache group.

    Attributes, all indexed by row:
        token_ids: [max_num_seqs, max_model_len] int32: the prompt, then every token sampled so far.
        num_tokens: how many of them are known. The worker's own count: it holds tokens that the scheduler, one step
            ahead, has only placeholders for.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: leading tokens whose KV is in the cache, as of the step being prepared.
        block_tables: for each group [max_num_seqs, blocks of max_model_len] int32.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, vocab_size: int, block_sizes: list[int]) -> None:
        self.row_of: dict[str, int] = {}
        self._vocab_size = vocab_size
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

        self._temperature = np.zeros(max_num_seqs, dtype=np.float64)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float64)
        self._seed = np.zeros(max_num_seqs, dtype=np.int64)
        self._choice_index = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._ending_ids: dict[int, NDArray[np.int64]] = {}  # of rows with min_tokens

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Brings the batch to the state in which the step begins."""
        for req_id in scheduler_output.finished_req_ids:
            self.remove(req_id)
        for req_id in scheduler_output.preempted_req_ids:
            self.remove(req_id)
        self._update(scheduler_output.scheduled_cached_reqs)
        for request in scheduler_output.scheduled_new_reqs:
            self.add(request)

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
        self._set_sampling(row, request.sampling_params, request.eos_token_ids)
        self._choice_index[row] = request.choice_index

    def remove(self, req_id: str) -> None:
        """Forgets a request. One that never reached the worker (aborted before its first step) is not an error."""
        row = self.row_of.pop(req_id, None)
        if row is not None:
            self._ending_ids.pop(row, None)
            self._free_rows.append(row)

    def rows(self, req_ids: list[str]) -> NDArray[np.int64]:
        """Rows of requests that the batch holds."""
        return np.array([self.row_of[req_id] for req_id in req_ids], dtype=np.int64)

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """One sampled token for each of ``rows``."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def sampling_metadata(self, rows: NDArray[np.int64]) -> SamplingMetadata:
        """What ``rows`` ask of the sampler for their next token."""
        position = self.num_tokens[rows] - self.num_prompt_tokens[rows]
        banned_rows, banned_ids = self._banned(rows, position)
        return SamplingMetadata(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            seed=self._seed[rows],
            choice_index=self._choice_index[rows],
            output_position=position,
            num_logprobs=self._num_logprobs[rows],
            banned_rows=banned_rows,
            banned_ids=banned_ids,
        )

    def _banned(
        self, rows: NDArray[np.int64], position: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(index into ``rows``, token id) pairs: what would end a request before its min_tokens."""
        early = np.flatnonzero(position < self._min_tokens[rows]) if self._ending_ids else np.empty(0, np.int64)
        if early.size == 0:
            return early, early
        ids = [self._ending_ids[row] for row in rows[early].tolist()]
        return np.repeat(early, [len(some) for some in ids]), np.concatenate(ids)

    def _update(self, cached: CachedRequestData) -> None:
        rows = self.rows(cached.req_ids)
        self.num_computed_tokens[rows] = cached.num_computed_tokens
        # Fewer outputs than are held here: the scheduler has taken tokens back. More: one in flight failed.
        counted = self.num_prompt_tokens[rows] + np.array(cached.num_output_tokens, dtype=np.int64)
        self.num_tokens[rows] = np.minimum(self.num_tokens[rows], counted)
        for row, block_ids in zip(rows.tolist(), cached.new_block_ids, strict=True):
            if block_ids is not None:
                self._append_blocks(row, block_ids)

    def _append_blocks(self, row: int, block_ids: BlockIds) -> None:
        for group, new in enumerate(block_ids):
            start = self._num_blocks[group, row]
            self.block_tables[group][row, start : start + len(new)] = new
            self._num_blocks[group, row] = start + len(new)

    def _set_sampling(self, row: int, params: SamplingParams, eos_token_ids: list[int]) -> None:
        if params.seed is None:
            raise ValueError("sampling_params.seed must be set before a request reaches the worker")
        self._temperature[row] = 0.0 if params.greedy else params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._seed[row] = params.seed
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._min_tokens[row] = params.min_tokens
        if params.min_tokens > 0:
            ids = np.unique(np.array([*eos_token_ids, *params.stop_token_ids], dtype=np.int64))
            # A checkpoint may name an end of sequence that is beyond its own vocabulary: it can't be sampled anyway.
            self._ending_ids[row] = ids[ids < self._vocab_size]
