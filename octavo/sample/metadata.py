"""What the rows of a batch ask of the sampler, as arrays that run parallel to the rows of the logits."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["SamplingMetadata"]


def _none() -> NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """One entry a row, all arrays of shape [rows].

    Attributes:
        temperature: float64; 0.0 takes the most likely token.
        top_k: int64; 0 keeps all tokens.
        top_p: float64; 1.0 keeps all tokens.
        seed: int64; key of the row's random numbers, with the two below.
        choice_index: int64; which of the request's n choices.
        output_position: int64; how many tokens the request has generated so far.
        num_logprobs: int64; so many top logprobs are wanted; -1: none, not the sampled token's either.
        banned_rows, banned_ids: int64, [pairs]; token ``banned_ids[i]`` may not be sampled in row ``banned_rows[i]``.
            Their logprobs stay those of the raw distribution.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    seed: NDArray[np.int64]
    choice_index: NDArray[np.int64]
    output_position: NDArray[np.int64]
    num_logprobs: NDArray[np.int64]
    banned_rows: NDArray[np.int64] = field(default_factory=_none)
    banned_ids: NDArray[np.int64] = field(default_factory=_none)
