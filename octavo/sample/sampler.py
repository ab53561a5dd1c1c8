"""The sampler: temperature, top-k, top-p, the draw, logprobs. The torch definition of what a batch row gets.

Every step is an elementwise operation, an exact selection or a running sum along one row, so that a row's result
does not depend on the rows around it. A filter costs nothing in a batch, and in a row, that does not use it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.sample.metadata import SamplingMetadata
from octavo.sample.philox import uniforms
from octavo.types import PositionLogprobs

__all__ = ["Sampler", "SamplerOutput"]

# Rows are worked on in chunks of about so many logits: bounds the double-precision workspace (8 MiB an array).
_CHUNK_LOGITS = 1 << 20
# Top-p looks among so many most likely tokens first, and at the whole vocabulary only where they do not suffice.
_FIRST_CANDIDATES = 1024

_NAN = "the model computed NaN logits for this request"
_EMPTY = "no token can be sampled for this request: all its logits are -inf"


@dataclass(slots=True)
class SamplerOutput:
    """Attributes:

    token_ids: [rows] int64; -1 in rows that failed.
    logprobs: row → its logprobs, for rows that asked and did not fail.
    errors: row → what is wrong with its logits.
    """

    token_ids: NDArray[np.int64]
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Draws one token a row."""

    @staticmethod
    def workspace_bytes(num_rows: int, vocab_size: int) -> int:
        """Bytes that a call with so many rows needs at most, its logits included: those, a raw copy where banned
        tokens and logprobs meet, and per chunk about four arrays of doubles and two of the tie search."""
        chunk = min(num_rows, max(1, _CHUNK_LOGITS // vocab_size))
        return num_rows * vocab_size * 4 * 2 + chunk * vocab_size * 8 * 6

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Samples.

        Args:
            logits: [rows, vocab_size] float32; banned tokens are overwritten with -inf.
            metadata: what the rows ask.
        """
        raw = logits
        asks_logprobs = metadata.num_logprobs >= 0
        if metadata.banned_rows.size:
            if asks_logprobs.any():
                raw = logits.clone()
            logits[torch.from_numpy(metadata.banned_rows), torch.from_numpy(metadata.banned_ids)] = -torch.inf

        # torch.argmax is defined to return the first of equal maxima, and NaN where there is one.
        chosen = logits.argmax(dim=-1)
        best = logits.gather(1, chosen[:, None]).squeeze(1)
        errors = _find_errors(best.numpy(force=True))
        token_ids: NDArray[np.int64] = chosen.numpy(force=True)
        sound = np.ones(len(token_ids), dtype=bool)
        sound[list(errors)] = False

        drawn = np.flatnonzero((metadata.temperature > 0.0) & sound)
        if drawn.size:
            uniform = uniforms(metadata.seed[drawn], metadata.choice_index[drawn], metadata.output_position[drawn])
            for piece in _pieces(drawn.size, logits.shape[1]):
                token_ids[drawn[piece]] = _draw(logits, best, drawn[piece], uniform[piece], metadata)
        output = SamplerOutput(token_ids, errors=errors)
        asking = np.flatnonzero(asks_logprobs & sound)
        if asking.size:
            if raw is not logits:
                asking = _without_hidden_nan(raw, asking, output.errors)
            for piece in _pieces(asking.size, logits.shape[1]):
                _add_logprobs(raw, asking[piece], metadata.num_logprobs[asking[piece]], output)
        token_ids[list(errors)] = -1
        return output


def _pieces(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Cuts rows into pieces of a bounded number of logits."""
    size = max(1, _CHUNK_LOGITS // vocab_size)
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _find_errors(best: NDArray[np.float32]) -> dict[int, str]:
    """Rows that nothing can be sampled from, by their largest logit."""
    errors = dict.fromkeys(np.flatnonzero(np.isnan(best)).tolist(), _NAN)
    return errors | dict.fromkeys(np.flatnonzero(np.isneginf(best)).tolist(), _EMPTY)


def _without_hidden_nan(raw: Tensor, rows: NDArray[np.int64], errors: dict[int, str]) -> NDArray[np.int64]:
    """``rows`` without those whose raw logits are NaN behind a banned token; these become errors."""
    hidden = torch.isnan(raw.amax(dim=-1)).numpy(force=True)[rows]
    errors.update(dict.fromkeys(rows[hidden].tolist(), _NAN))
    sound: NDArray[np.int64] = rows[~hidden]
    return sound


def _below_best(logits: Tensor, best: Tensor) -> Tensor:
    """``logits - best`` in double: [rows, vocab_size]. Infinite logits are the only likely ones where there are any,
    each as likely as the other."""
    below = logits.double().sub_(best.double()[:, None])
    if bool(torch.isposinf(best).any()):
        below.nan_to_num_(nan=0.0, neginf=-torch.inf)
    return below


def _draw(
    logits: Tensor, best: Tensor, rows: NDArray[np.int64], uniform: NDArray[np.float64], metadata: SamplingMetadata
) -> NDArray[np.int64]:
    """Tokens of ``rows``: the inverse of the cumulative distribution, in ascending order of ids."""
    index = torch.from_numpy(rows)
    chosen_logits = logits.index_select(0, index)
    temperature = torch.from_numpy(metadata.temperature[rows])
    weights = _below_best(chosen_logits, best.index_select(0, index)).div_(temperature[:, None]).exp_()

    vocab_size = logits.shape[1]
    top_k, top_p = metadata.top_k[rows], metadata.top_p[rows]
    top_k = np.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
    filtered = np.flatnonzero((top_k < vocab_size) | (top_p < 1.0))
    if filtered.size == len(rows):
        weights.mul_(_kept(chosen_logits, weights, top_k, top_p))
    elif filtered.size:
        some = torch.from_numpy(filtered)
        part = weights.index_select(0, some)
        part.mul_(_kept(chosen_logits.index_select(0, some), part, top_k[filtered], top_p[filtered]))
        weights.index_copy_(0, some, part)

    cumulative = weights.cumsum_(dim=-1)
    point = torch.from_numpy(uniform) * cumulative[:, -1]
    # The first id whose cumulative weight is above the point: never one of weight zero.
    drawn: NDArray[np.int64] = torch.searchsorted(cumulative, point[:, None], right=True).squeeze(1).numpy(force=True)
    return drawn


def _kept(logits: Tensor, weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
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
    return _largest(logits, threshold, torch.from_numpy(counts))


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


def _largest(logits: Tensor, threshold: Tensor, counts: Tensor) -> Tensor:
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


def _add_logprobs(raw: Tensor, rows: NDArray[np.int64], num_logprobs: NDArray[np.int64], output: SamplerOutput) -> None:
    """Fills ``output.logprobs`` for ``rows``."""
    logits = raw.index_select(0, torch.from_numpy(rows))
    below = _below_best(logits, logits.amax(dim=-1))
    log_total = below.exp().cumsum_(dim=-1)[:, -1:].log_()

    ids = torch.from_numpy(output.token_ids[rows])[:, None]
    sampled = logits.gather(1, ids)
    earlier = torch.arange(logits.shape[1]) < ids
    ranks = ((logits > sampled) | ((logits == sampled) & earlier)).sum(dim=-1) + 1
    most = min(int(num_logprobs.max()), logits.shape[1])
    if most > 0:
        ids = torch.cat([ids, _top_ids(logits, most)], dim=1)
    logprobs = (below.gather(1, ids) - log_total).float()
    columns = zip(rows.tolist(), num_logprobs.tolist(), ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    for row, wanted, row_ids, row_logprobs, rank in columns:
        output.logprobs[row] = PositionLogprobs(row_ids[: wanted + 1], row_logprobs[: wanted + 1], rank)


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """The ``count`` most likely ids of each row in descending order, ties lower id first: [rows, count]."""
    threshold = logits.topk(count, dim=-1).values[:, -1:]
    counts = torch.full((logits.shape[0],), count)
    ascending = _largest(logits, threshold, counts).nonzero()[:, 1].view(-1, count)
    order = logits.gather(1, ascending).sort(dim=-1, descending=True, stable=True).indices
    return ascending.gather(1, order)
