"""The tensors of one step, built from the InputBatch with vectorised code: no loop over tokens anywhere."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention import AttentionMetadata
from octavo.worker.input_batch import InputBatch

__all__ = ["StepInputs", "build_step_inputs"]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Requests are in the order in which they were scheduled, and so are their tokens.

    Attributes:
        input_ids, positions: [num_tokens] int64.
        metadata: for each KV cache group.
        sampling: [num_sampling] which of the step's requests sample: those whose last known token is computed.
        sampling_tokens: [num_sampling] where that token is among the step's tokens.
    """

    input_ids: Tensor
    positions: Tensor
    metadata: list[AttentionMetadata]
    sampling: NDArray[np.int64]
    sampling_tokens: Tensor


def build_step_inputs(batch: InputBatch, rows: NDArray[np.int64], num_scheduled: NDArray[np.int64]) -> StepInputs:
    """Inputs of a step with at least one request.

    Args:
        batch: the state in which the step begins.
        rows: [num_reqs] the requests' rows.
        num_scheduled: [num_reqs] tokens to compute of each.
    """
    computed = batch.num_computed_tokens[rows]
    seq_lens = computed + num_scheduled
    ends = np.cumsum(num_scheduled)
    query_start_loc = np.concatenate([[0], ends])
    token_rows = np.repeat(rows, num_scheduled)
    positions = np.arange(ends[-1]) + np.repeat(computed - query_start_loc[:-1], num_scheduled)
    sampling = np.flatnonzero(seq_lens == batch.num_tokens[rows])
    max_seq_len = int(seq_lens.max())

    query_starts = torch.from_numpy(query_start_loc.astype(np.int32))
    lengths = torch.from_numpy(seq_lens.astype(np.int32))
    metadata = []
    for block_size, table in zip(batch.block_sizes, batch.block_tables, strict=True):
        blocks = table[token_rows, positions // block_size].astype(np.int64)
        metadata.append(
            AttentionMetadata(
                query_start_loc=query_starts,
                seq_lens=lengths,
                block_table=torch.from_numpy(table[rows, : -(-max_seq_len // block_size)]),
                slot_mapping=torch.from_numpy(blocks * block_size + positions % block_size),
                max_query_len=int(num_scheduled.max()),
                max_seq_len=max_seq_len,
            )
        )
    return StepInputs(
        input_ids=torch.from_numpy(batch.token_ids[token_rows, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        metadata=metadata,
        sampling=sampling,
        sampling_tokens=torch.from_numpy(ends[sampling] - 1),
    )
