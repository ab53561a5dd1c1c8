"""Log-probabilities of the raw distribution: of the sampled token, the most likely ones, or those that were named."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.sample.selection import below_best, largest, pieces
from octavo.types import PositionLogprobs

__all__ = ["named_logprobs", "top_logprobs"]


def top_logprobs(
    logits: Tensor, rows: NDArray[np.int64], token_ids: NDArray[np.int64], num_logprobs: NDArray[np.int64]
) -> dict[int, PositionLogprobs]:
    """For each of ``rows`` the logprobs of its token and of the most likely ones.

    Args:
        logits: [all rows, vocab_size]; finite, or infinite, but no NaN, and not all -inf.
        rows: [rows] those that ask.
        token_ids: [rows] the sampled tokens.
        num_logprobs: [rows] how many of the most likely ones, 0 up.
    """
    found: dict[int, PositionLogprobs] = {}
    # Those that ask for much are in pieces by themselves, as far as may be: a piece is sorted for the most of its rows.
    order = np.argsort(num_logprobs, kind="stable")
    for piece in pieces(rows.size, logits.shape[1]):
        some = order[piece]
        selected = logits.index_select(0, torch.from_numpy(rows[some]))
        logprobs = _normalized(selected)
        ids = torch.from_numpy(token_ids[some])[:, None]
        sampled = selected.gather(1, ids)
        earlier = torch.arange(logits.shape[1]) < ids
        ranks = ((selected > sampled) | ((selected == sampled) & earlier)).sum(dim=-1) + 1
        most = min(int(num_logprobs[some].max()), logits.shape[1])
        if most > 0:
            ids = torch.cat([ids, _top_ids(selected, most)], dim=1)
        columns = (rows[some], num_logprobs[some], ids, logprobs.gather(1, ids).float(), ranks)
        for row, wanted, row_ids, row_logprobs, rank in zip(*(column.tolist() for column in columns), strict=True):
            found[row] = PositionLogprobs(row_ids[: wanted + 1], row_logprobs[: wanted + 1], rank)
    return found


def named_logprobs(
    logits: Tensor, token_ids: NDArray[np.int64], asked: Mapping[int, NDArray[np.int64]]
) -> dict[int, PositionLogprobs]:
    """For each row in ``asked`` the logprobs and ranks of its token and of the ids that it names.

    Args:
        logits: as for ``top_logprobs``.
        token_ids: [all rows] the sampled tokens.
        asked: row → ids.
    """
    found: dict[int, PositionLogprobs] = {}
    rows = np.array(list(asked), dtype=np.int64)
    for piece in pieces(rows.size, logits.shape[1]):
        selected = logits.index_select(0, torch.from_numpy(rows[piece]))
        # All ranks at once: a comparison for each of a thousand ids would cost more than one sort.
        order = selected.sort(dim=-1, descending=True, stable=True).indices
        ranks = torch.empty_like(order).scatter_(1, order, torch.arange(1, order.shape[1] + 1).expand_as(order))
        logprobs = _normalized(selected)
        for at, row in enumerate(rows[piece].tolist()):
            ids = torch.from_numpy(np.concatenate([token_ids[row : row + 1], asked[row]]))
            row_ranks = ranks[at, ids].tolist()
            found[row] = PositionLogprobs(ids.tolist(), logprobs[at, ids].float().tolist(), row_ranks[0], row_ranks[1:])
    return found


def _normalized(logits: Tensor) -> Tensor:
    """Logprobs in double: [rows, vocab_size]."""
    below = below_best(logits, logits.amax(dim=-1))
    return below.sub_(below.exp().cumsum_(dim=-1)[:, -1:].log_())


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """The ``count`` most likely ids of each row in descending order, ties lower id first: [rows, count]."""
    if count == logits.shape[1]:
        return logits.sort(dim=-1, descending=True, stable=True).indices
    threshold = logits.topk(count, dim=-1).values[:, -1:]
    counts = torch.full((logits.shape[0],), count)
    ascending = largest(logits, threshold, counts).nonzero()[:, 1].view(-1, count)
    order = logits.gather(1, ascending).sort(dim=-1, descending=True, stable=True).indices
    return ascending.gather(1, order)
