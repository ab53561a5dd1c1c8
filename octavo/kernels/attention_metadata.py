"""Which tokens a step computes and where their KV lies: the argument that attention ops of every provider share.

It is computed once a step for each KV cache group and read by all layers of the group. ``row_groups`` is how the torch
definition walks it; other providers read the tensors.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["AttentionMetadata", "RowGroup"]

# A group of rows is computed at once; these bound the memory that takes. Rows of one prompt at once:
_MAX_TILE_ROWS = 256
# Scores of one head, i.e. rows × KV positions, of one tile of a prompt:
_MAX_TILE_SCORES = 1 << 20
# KV positions gathered at once for decode rows:
_MAX_DECODE_POSITIONS = 1 << 16


@dataclass(frozen=True)
class RowGroup:
    """R requests with Q query rows each, all looking at S KV positions of their own.

    Attributes:
        rows: [R, Q] int64, indices into the step's tokens.
        slots: [R, S] int64, block × block_size + offset. Every slot is one that the request has written: positions
            past its end stand for its last one, so that hidden lanes never read unwritten KV (0 × NaN is NaN).
        hidden: [R, Q, S] bool, True where a row may not look; None where every row may look everywhere.
    """

    rows: Tensor
    slots: Tensor
    hidden: Tensor | None


@dataclass
class AttentionMetadata:
    """Attributes:

    query_start_loc: [num_reqs + 1] int32, where each request's rows begin among the step's tokens.
    seq_lens: [num_reqs] int32, tokens of each request when the step is done, this step's rows included.
    block_table: [num_reqs, max_blocks] int32.
    slot_mapping: [num_tokens] int64, block × block_size + offset that each token's KV is written to.
    max_query_len, max_seq_len: largest number of rows, and of tokens, of a request.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    _row_groups: dict[tuple[int, int | None], list[RowGroup]] = field(default_factory=dict, init=False, repr=False)

    def row_groups(self, block_size: int, sliding_window: int | None) -> list[RowGroup]:
        """The step's rows, each in one group; made at the first call, for all layers of the KV cache group."""
        found = self._row_groups.get((block_size, sliding_window))
        if found is None:
            found = self._make_row_groups(block_size, sliding_window)
            self._row_groups[block_size, sliding_window] = found
        return found

    def _make_row_groups(self, block_size: int, window: int | None) -> list[RowGroup]:
        starts = self.query_start_loc.tolist()
        ends = self.seq_lens.tolist()
        decodes: list[tuple[int, int]] = []
        groups: list[RowGroup] = []
        for request, end in enumerate(ends):
            num_rows = starts[request + 1] - starts[request]
            if num_rows == 1:
                decodes.append((end if window is None else min(end, window), request))
            elif num_rows > 1:
                groups += self._prompt_groups(request, starts[request], num_rows, end, block_size, window)
        return groups + [self._decode_group(requests, block_size, window) for requests in _alike(decodes)]

    def _prompt_groups(
        self, request: int, start: int, num_rows: int, end: int, block_size: int, window: int | None
    ) -> list[RowGroup]:
        """Tiles of a request's rows: R = 1, all rows of a tile look at the same positions, up to the tile's last."""
        device = self.block_table.device
        tile_rows = max(1, min(_MAX_TILE_ROWS, _MAX_TILE_SCORES // end))
        groups = []
        for tile in range(0, num_rows, tile_rows):
            size = min(tile_rows, num_rows - tile)
            first = end - num_rows + tile  # position of the tile's first row
            oldest = 0 if window is None else max(0, first - window + 1)
            queries = torch.arange(first, first + size, device=device).unsqueeze(1)
            positions = torch.arange(oldest, first + size, device=device).unsqueeze(0)
            hidden = positions > queries
            if window is not None:
                hidden |= positions <= queries - window
            rows = torch.arange(start + tile, start + tile + size, device=device).unsqueeze(0)
            requests = torch.tensor([request], device=device)
            groups.append(RowGroup(rows, self._slots(requests, positions, block_size), hidden.unsqueeze(0)))
        return groups

    def _decode_group(self, requests: list[int], block_size: int, window: int | None) -> RowGroup:
        """Q = 1: the newest token of several requests, which looks at all positions in its window."""
        chosen = torch.tensor(requests, device=self.block_table.device)
        ends = self.seq_lens[chosen].long().unsqueeze(1)
        oldest = torch.zeros_like(ends) if window is None else (ends - window).clamp_(min=0)
        positions = oldest + torch.arange(int((ends - oldest).max()), device=chosen.device)
        hidden = (positions >= ends).unsqueeze(1) if len(requests) > 1 else None
        slots = self._slots(chosen, torch.minimum(positions, ends - 1), block_size)
        return RowGroup(self.query_start_loc[chosen].long().unsqueeze(1), slots, hidden)

    def _slots(self, requests: Tensor, positions: Tensor, block_size: int) -> Tensor:
        blocks = self.block_table[requests].gather(1, positions // block_size)
        return blocks.long() * block_size + positions % block_size


def _alike(decodes: list[tuple[int, int]]) -> list[list[int]]:
    """(length, request) pairs, cut into lists of requests so alike in length that padding at most doubles the work."""
    batches: list[list[int]] = []
    shortest = 0
    for length, request in sorted(decodes):
        full = batches and (len(batches[-1]) + 1) * length > _MAX_DECODE_POSITIONS
        if not batches or full or length > 2 * shortest + 64:
            batches.append([])
            shortest = length
        batches[-1].append(request)
    return batches
