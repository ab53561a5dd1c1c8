"""Logprobs of the prompt's tokens, for the requests that ask for them, in pieces of bounded memory.

The logits of a long prompt are never there all at once: a piece is computed, read, and gone before the next.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.sample import Sampler
from octavo.types import PositionLogprobs, PromptLogprobs
from octavo.worker.input_batch import InputBatch

__all__ = ["PromptRows", "compute_prompt_logprobs", "find_prompt_rows", "piece_rows"]

# 64 MiB of logits: enough rows to make good use of each pass over the output weights.
_PIECE_LOGITS = 1 << 24
# Stands for a position of a request that fails; nobody gets it.
_UNKNOWN = PositionLogprobs([], [], 0)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens of a step that another token of the prompt follows, of requests that want to know its logprobs.

    Attributes:
        requests: [parts] which of the step's requests have some.
        starts: [parts] position in the prompt of the first token that follows one of them.
        counts: [parts] how many there are.
        num_logprobs: [parts] how many logprobs are listed at each.
        tokens: [rows] where they are among the step's tokens; part by part.
        next_ids: [rows] the tokens that follow them.
    """

    requests: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    num_logprobs: NDArray[np.int64]
    tokens: NDArray[np.int64]
    next_ids: NDArray[np.int64]


def find_prompt_rows(batch: InputBatch, rows: NDArray[np.int64], num_scheduled: NDArray[np.int64]) -> PromptRows | None:
    """What a step owes of prompt logprobs; None: nothing. Arguments as for ``StepInputs.fill``."""
    asking = np.flatnonzero(batch.num_prompt_logprobs[rows] >= 0)
    if asking.size == 0:
        return None
    computed = batch.num_computed_tokens[rows[asking]]
    counts = np.minimum(num_scheduled[asking], batch.num_prompt_tokens[rows[asking]] - 1 - computed)
    some = counts > 0
    if not some.any():
        return None
    requests, first, counts = asking[some], computed[some], counts[some]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    step_starts = np.cumsum(num_scheduled) - num_scheduled
    next_positions = np.repeat(first, counts) + within + 1
    return PromptRows(
        requests=requests,
        starts=first + 1,
        counts=counts,
        num_logprobs=batch.num_prompt_logprobs[rows[requests]],
        tokens=np.repeat(step_starts[requests], counts) + within,
        next_ids=batch.token_ids[np.repeat(rows[requests], counts), next_positions].astype(np.int64),
    )


def piece_rows(vocab_size: int) -> int:
    """Rows whose logits are there at once."""
    return max(1, _PIECE_LOGITS // vocab_size)


def compute_prompt_logprobs(
    compute_logits: Callable[[Tensor], Tensor], hidden: Tensor, prompt: PromptRows, vocab_size: int
) -> tuple[dict[int, PromptLogprobs], dict[int, str]]:
    """Logprobs of all rows of a step.

    Args:
        hidden: [rows, hidden_size], those of ``prompt.tokens``.

    Returns:
        For the step's requests that have some: their logprobs, or what is wrong with their logits.
    """
    num_logprobs = np.repeat(prompt.num_logprobs, prompt.counts)
    entries: list[PositionLogprobs] = []
    broken: dict[int, str] = {}
    size = piece_rows(vocab_size)
    for start in range(0, len(prompt.next_ids), size):
        piece = slice(start, start + size)
        found = Sampler.score(compute_logits(hidden[piece]), prompt.next_ids[piece], num_logprobs[piece])
        broken |= {start + row: message for row, message in found.errors.items()}
        entries += [found.logprobs.get(row, _UNKNOWN) for row in range(len(found.token_ids))]
    logprobs: dict[int, PromptLogprobs] = {}
    errors: dict[int, str] = {}
    ends = np.cumsum(prompt.counts).tolist()
    columns = (prompt.requests.tolist(), prompt.starts.tolist(), prompt.counts.tolist(), ends)
    for request, position, count, end in zip(*columns, strict=True):
        message = next((broken[row] for row in range(end - count, end) if row in broken), None)
        if message is None:
            logprobs[request] = PromptLogprobs(position, entries[end - count : end])
        else:
            errors[request] = message
    return logprobs, errors
