"""The tensors of one step, built from the InputBatch with vectorised code: no loop over tokens anywhere.

They are buffers that stay where they are, filled anew for each step: a recorded forward reads them there. Beside native
kernels one native call fills them (csrc/cpu/step_inputs.hpp): after a forward the caches are empty, and each of the
numpy functions that are the definition costs what it does not cost in a loop.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention import AttentionMetadata
from octavo.kernels import chosen_provider
from octavo.worker.input_batch import InputBatch

if TYPE_CHECKING:
    from octavo import _native

__all__ = ["Filled", "StepInputs"]


@dataclass(frozen=True, slots=True)
class Filled:
    """What the buffers hold. Requests are in the order in which they were scheduled, and so are their tokens.

    Attributes:
        sampling: [num_sampling] which of the step's requests sample: those whose last known token is computed; good
            until the next step.
    """

    num_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    sampling: NDArray[np.int64]


class _Group:
    """Buffers of one KV cache group."""

    def __init__(self, max_tokens: int, max_reqs: int, block_size: int, max_blocks: int) -> None:
        self.block_size = block_size
        self.block_table = np.zeros((max_reqs, max_blocks), dtype=np.int32)
        self.slot_mapping = np.zeros(max_tokens, dtype=np.int64)
        self.slots_address: int = self.slot_mapping.ctypes.data
        self.tensors = (torch.from_numpy(self.block_table), torch.from_numpy(self.slot_mapping))


class StepInputs:
    """Args:

    batch: which the step's requests are in.
    max_tokens: of a step.
    max_reqs: requests of a step.

    Attributes:
        input_ids, positions: [max_tokens] int64.
        native: what fills them, where that is native.
    """

    def __init__(self, batch: InputBatch, max_tokens: int, max_reqs: int) -> None:
        self._batch = batch
        self._max_model_len = batch.token_ids.shape[1]
        self._input_ids = np.zeros(max_tokens, dtype=np.int64)
        self._positions = np.zeros(max_tokens, dtype=np.int64)
        self._query_start_loc = np.zeros(max_reqs + 1, dtype=np.int32)
        self._seq_lens = np.zeros(max_reqs, dtype=np.int32)
        self._sampling = np.zeros(max_reqs, dtype=np.int64)
        self._sampling_tokens = np.zeros(max_reqs, dtype=np.int64)
        self._groups = [
            _Group(max_tokens, max_reqs, size, table.shape[1])
            for size, table in zip(batch.block_sizes, batch.block_tables, strict=True)
        ]
        self.native = self._native_filler() if chosen_provider() == "native" else None
        self.input_ids, self.positions = torch.from_numpy(self._input_ids), torch.from_numpy(self._positions)
        self._starts, self._lengths = torch.from_numpy(self._query_start_loc), torch.from_numpy(self._seq_lens)

    def of_tokens(self) -> tuple[Tensor, ...]:
        """The buffers with a row for each token."""
        return self.input_ids, self.positions, *(group.tensors[1] for group in self._groups)

    def metadata(self, filled: Filled) -> list[AttentionMetadata]:
        """For each KV cache group: views of the buffers."""
        return [
            AttentionMetadata(
                query_start_loc=self._starts[: filled.num_reqs + 1],
                seq_lens=self._lengths[: filled.num_reqs],
                block_table=group.tensors[0][: filled.num_reqs],
                slot_mapping=group.tensors[1][: filled.num_tokens],
                max_query_len=filled.max_query_len,
                max_seq_len=filled.max_seq_len,
            )
            for group in self._groups
        ]

    def fill(self, rows: NDArray[np.int64], num_scheduled: list[int]) -> Filled:
        """For a step with at least one request.

        Args:
            rows: [num_reqs] the requests' rows.
            num_scheduled: tokens to compute of each.
        """
        if self.native is None:
            return self._fill(rows, np.array(num_scheduled, dtype=np.int64))
        num_tokens, max_query_len, max_seq_len, num_sampling = self.native.fill(rows.tolist(), num_scheduled)
        return Filled(num_tokens, len(num_scheduled), max_query_len, max_seq_len, self._sampling[:num_sampling])

    def select_sampling(self, hidden: Tensor, filled: Filled) -> Tensor:
        """The last tokens of the requests that sample: [num_sampling, hidden_size]. They may be moved to the front of
        ``hidden``, whose other rows are lost then."""
        count = len(filled.sampling)
        if count == hidden.shape[0]:
            return hidden
        if self.native is None:
            return hidden.index_select(0, torch.from_numpy(self._sampling_tokens[:count]))
        self.native.gather(hidden.data_ptr(), hidden.stride(0) * hidden.itemsize, count)
        return hidden[:count]

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """One sampled token for each of ``rows`` of the batch."""
        if self.native is None:
            self._batch.append_tokens(rows, token_ids)
        else:
            self.native.append_tokens(rows.tolist(), token_ids.tolist())

    def _native_filler(self) -> "_native.StepInputs":
        from octavo import _native  # not there where it could not be built

        batch = self._batch
        of_batch = (batch.token_ids, batch.num_tokens, batch.num_computed_tokens)
        of_step = (
            self._input_ids,
            self._positions,
            self._query_start_loc,
            self._seq_lens,
            self._sampling,
            self._sampling_tokens,
        )
        groups = [
            (table.ctypes.data, table.shape[1], group.block_size, group.block_table.ctypes.data, group.slots_address)
            for group, table in zip(self._groups, batch.block_tables, strict=True)
        ]
        return _native.step_inputs(
            [array.ctypes.data for array in of_batch],
            *batch.token_ids.shape,
            [array.ctypes.data for array in of_step],
            len(self._input_ids),
            len(self._seq_lens),
            groups,
        )

    def _fill(self, rows: NDArray[np.int64], num_scheduled: NDArray[np.int64]) -> Filled:
        batch, num_reqs = self._batch, len(rows)
        computed = batch.num_computed_tokens[rows]
        seq_lens = computed + num_scheduled
        ends = num_scheduled.cumsum()
        num_tokens = int(ends[-1])
        self._query_start_loc[1 : num_reqs + 1] = ends
        self._seq_lens[:num_reqs] = seq_lens
        if num_tokens == num_reqs:  # one token of each
            token_rows, positions = rows, computed
        else:
            token_rows = rows.repeat(num_scheduled)
            positions = np.arange(num_tokens) + (seq_lens - ends).repeat(num_scheduled)
        self._positions[:num_tokens] = positions
        self._input_ids[:num_tokens] = batch.token_ids[token_rows, positions]
        max_seq_len = int(seq_lens.max())
        for group, table in zip(self._groups, batch.block_tables, strict=True):
            size = group.block_size
            blocks, offsets = np.divmod(positions, size)
            group.slot_mapping[:num_tokens] = table[token_rows, blocks] * np.int64(size) + offsets
            num_blocks = -(-max_seq_len // size)
            group.block_table[:num_reqs, :num_blocks] = table[rows, :num_blocks]
        sampling = (seq_lens == batch.num_tokens[rows]).nonzero()[0]
        self._sampling_tokens[: len(sampling)] = ends[sampling] - 1
        return Filled(num_tokens, num_reqs, int(num_scheduled.max()), max_seq_len, sampling)

    def fill_with_one(self, num_tokens: int) -> Filled:
        """A made-up request of ``num_tokens``, whose KV is all in block 1, which nobody has when a worker starts: for
        recording and warming up."""
        self._query_start_loc[:2] = 0, num_tokens
        self._seq_lens[0] = num_tokens
        self._positions[:num_tokens] = np.arange(num_tokens) % self._max_model_len
        self._input_ids[:num_tokens] = 0
        for group in self._groups:
            group.block_table[0] = 1
            group.slot_mapping[:num_tokens] = group.block_size + np.arange(num_tokens) % group.block_size
        self._sampling_tokens[0] = num_tokens - 1
        return Filled(num_tokens, 1, num_tokens, num_tokens, np.zeros(1, dtype=np.int64))
