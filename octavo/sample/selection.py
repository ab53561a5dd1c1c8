"""What the parts of the sampler share: pieces of bounded size, (row, token) pairs, distances from the best, exact
selection with ties.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["CHUNK_LOGITS", "below_best", "largest", "pairs", "pieces"]

# Rows are worked on in chunks of about so many logits: bounds the double-precision workspace (8 MiB an array).
CHUNK_LOGITS = 1 << 20


def pieces(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Cuts rows into pieces of a bounded number of logits."""
    size = max(1, CHUNK_LOGITS // vocab_size)
    return (slice(start, start + size) for start in range(0, num_rows, size))


def pairs(rows: Sequence[int], ids: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
    """Row and id of every pair, as an index into logits; ``ids[i]`` belong to ``rows[i]``."""
    lengths = [len(some) for some in ids]
    return torch.from_numpy(np.repeat(np.array(rows), lengths)), torch.from_numpy(np.concatenate(ids))


def below_best(logits: Tensor, best: Tensor) -> Tensor:
    """``logits - best`` in double: [rows, vocab_size]. Infinite logits are the only likely ones where there are any,
    each as likely as the other."""
    below = logits.double().sub_(best.double()[:, None])
    if bool(torch.isposinf(best).any()):
        below.nan_to_num_(nan=0.0, neginf=-torch.inf)
    return below


def largest(logits: Tensor, threshold: Tensor, counts: Tensor) -> Tensor:
    """Mask of exactly ``counts`` tokens in each row: those above the row's threshold, then those equal to it, lower
    ids first.

    Args:
        logits: [rows, vocab_size].
        threshold: [rows, 1], the ``counts``-th largest logit.
        counts: [rows].
    """
    mask = logits > threshold
    ties = logits == threshold
    room = (counts - mask.sum(dim=-1))[:, None]
    if bool((ties.sum(dim=-1, keepdim=True) > room).any()):
        ties &= ties.cumsum(dim=-1, dtype=torch.int32) <= room
    return mask.logical_or_(ties)
