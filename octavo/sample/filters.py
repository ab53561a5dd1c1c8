"""The draw: temperature, min-p, top-k, top-p, and the inverse of the cumulative distribution.

Every step is an elementwise operation, an exact selection or a running sum along one row. A filter is computed for the
rows that use it only.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.sample.metadata import SamplingMetadata
from octavo.sample.selection import below_best, largest

__all__ = ["draw"]

# Top-p looks among so many most likely tokens first, and at the whole vocabulary only where they do not suffice.
_FIRST_CANDIDATES = 1024


def draw(
    logits: Tensor, best: Tensor, rows: NDArray[np.int64], uniform: NDArray[np.float64], metadata: SamplingMetadata
) -> NDArray[np.int64]:
    """Tokens of ``rows``, in ascending order of ids along the cumulative distribution.

    Args:
        logits: [all rows, vocab_size].
        best: [all rows] the largest logit of each.
        rows: [rows] those to draw for.
        uniform: [rows] a number in [0, 1) for each.
    """
    index = torch.from_numpy(rows)
    chosen_logits = logits.index_select(0, index)
    temperature = torch.from_numpy(metadata.temperature[rows])
    weights = below_best(chosen_logits, best.index_select(0, index)).div_(temperature[:, None]).exp_()

    min_p = metadata.min_p[rows]
    # The most likely token has weight 1.
    _keep(weights, np.flatnonzero(min_p > 0.0), lambda some, part: part >= torch.from_numpy(min_p[some])[:, None])

    vocab_size = logits.shape[1]
    top_k, top_p = metadata.top_k[rows], metadata.top_p[rows]
    top_k = np.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)

    def most_likely(some: NDArray[np.int64], part: Tensor) -> Tensor:
        whole = len(some) == len(rows)
        part_logits = chosen_logits if whole else chosen_logits.index_select(0, torch.from_numpy(some))
        return _most_likely(part_logits, part, top_k[some], top_p[some])

    _keep(weights, np.flatnonzero((top_k < vocab_size) | (top_p < 1.0)), most_likely)

    cumulative = weights.cumsum_(dim=-1)
    point = torch.from_numpy(uniform) * cumulative[:, -1]
    # The first id whose cumulative weight is above the point: never one of weight zero.
    drawn: NDArray[np.int64] = torch.searchsorted(cumulative, point[:, None], right=True).squeeze(1).numpy(force=True)
    return drawn


def _keep(weights: Tensor, some: NDArray[np.int64], mask: Callable[[NDArray[np.int64], Tensor], Tensor]) -> None:
    """Sets weights to zero, in the rows ``some``, where ``mask(some, their weights)`` is False."""
    if some.size == weights.shape[0]:
        weights.mul_(mask(some, weights))
    elif some.size:
        index = torch.from_numpy(some)
        part = weights.index_select(0, index)
        weights.index_copy_(0, index, part.mul_(mask(some, part)))


def _most_likely(logits: Tensor, weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """Mask of the tokens that top-k and then top-p leave: [rows, vocab_size]."""
    vocab_size = logits.shape[1]
    limited = top_k < vocab_size
    num_candidates = int(max(top_k[limited].max(initial=0), 0 if limited.all() else min(_FIRST_CANDIDATES, vocab_size)))
    counts, threshold = _count_kept(logits, weights, top_k, top_p, num_candidates)
    short = np.flatnonzero(counts > num_candidates)
    if short.size:
        some = torch.from_numpy(short)
        counts[short], found = _count_kept(
            logits.index_select(0, some), weights.index_select(0, some), top_k[short], top_p[short], vocab_size
        )
        threshold.index_copy_(0, some, found)
    return largest(logits, threshold, torch.from_numpy(counts))


def _count_kept(
    logits: Tensor, weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], num_candidates: int
) -> tuple[NDArray[np.int64], Tensor]:
    """How many of the most likely tokens stay, and the smallest logit among them. A count above ``num_candidates``
    means that there were too few candidates to tell."""
    vocab_size = logits.shape[1]
    values, ids = logits.topk(num_candidates, dim=-1)
    limit = torch.from_numpy(top_k)
    nucleus = np.flatnonzero(top_p < 1.0)
    counts = limit.clone()
    if nucleus.size:
        some = torch.from_numpy(nucleus)
        kept_weights = weights.index_select(0, some)
        cumulative = kept_weights.gather(1, ids.index_select(0, some)).cumsum(dim=-1)
        limit = limit.index_select(0, some)
        within = cumulative.gather(1, limit.clamp(max=num_candidates)[:, None] - 1)
        whole = kept_weights.cumsum(dim=-1)[:, -1:]
        bound = torch.where(limit[:, None] < vocab_size, within, whole) * torch.from_numpy(top_p[nucleus])[:, None]
        counts[some] = torch.minimum((cumulative < bound).sum(dim=-1) + 1, limit)
    threshold = values.gather(1, counts.clamp(max=num_candidates)[:, None] - 1)
    return counts.numpy(force=True), threshold
