"""What the rows of a batch ask of the sampler, as arrays that run parallel to the rows of the logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.sample.logits_processor import NamedProcessor

__all__ = ["Penalties", "RowChanges", "SamplingMetadata"]


def _none() -> NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of one row, for the tokens they apply to.

    Attributes:
        ids: int64, [entries], each once.
        counts: int64, [entries]; how often each has been generated (0: it stands in the prompt only).
    """

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChanges:
    """How the logits of one row are changed before temperature, in this order. Its logprobs stay those of the raw
    distribution.

    Attributes:
        penalties: None: there are none.
        bias_ids, bias: int64 and float64, [entries], each id once; what is added.
        forbidden: bool, [vocab_size]; True where a token may not be sampled.
        banned_ids: int64; further ones that may not.
        processors: what is called with the tokens generated so far and the row.
        output_token_ids: those tokens.
    """

    penalties: Penalties | None = None
    bias_ids: NDArray[np.int64] = field(default_factory=_none)
    bias: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, dtype=np.float64))
    forbidden: NDArray[np.bool_] | None = None
    banned_ids: NDArray[np.int64] = field(default_factory=_none)
    processors: Sequence[NamedProcessor] = ()
    output_token_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    @property
    def ids(self) -> NDArray[np.int64]:
        """All tokens that penalties, bias and bans concern; some may stand there twice."""
        penalized = _none() if self.penalties is None else self.penalties.ids
        return np.concatenate([penalized, self.bias_ids, self.banned_ids])

    @property
    def num_entries(self) -> int:
        """How many those are."""
        penalized = 0 if self.penalties is None else self.penalties.ids.size
        return penalized + self.bias_ids.size + self.banned_ids.size


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """One entry a row, all arrays of shape [rows].

    Attributes:
        temperature: float64; 0.0 takes the most likely token.
        min_p: float64; 0.0 keeps all tokens.
        top_k: int64; 0 keeps all tokens.
        top_p: float64; 1.0 keeps all tokens.
        seed: int64; key of the row's random numbers, with the two below.
        choice_index: int64; which of the request's n choices.
        output_position: int64; how many tokens the request has generated so far.
        num_logprobs: int64; so many top logprobs are wanted; -1: none, not the sampled token's either.
        logprob_token_ids: row → int64 ids whose logprobs are wanted instead of the top ones.
        changes: row → how its logits are changed. Rows that are not here cost nothing.
    """

    temperature: NDArray[np.float64]
    min_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    seed: NDArray[np.int64]
    choice_index: NDArray[np.int64]
    output_position: NDArray[np.int64]
    num_logprobs: NDArray[np.int64]
    logprob_token_ids: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    changes: Mapping[int, RowChanges] = field(default_factory=dict)
