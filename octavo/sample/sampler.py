"""The sampler: from a batch of logits to tokens and logprobs."""

from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels import chosen_provider
from octavo.sample import definition
from octavo.sample.metadata import SamplingMetadata
from octavo.sample.output import EMPTY, SamplerOutput
from octavo.sample.selection import CHUNK_LOGITS
from octavo.types import NO_TOKEN_LEFT

__all__ = ["Sampler"]

# Bytes of a logprob in a list of Python's: id, value, and the two references to them.
_LISTED_BYTES = 80
# Arrays of doubles, as large as a chunk, that are alive at once in the step that takes most: logprobs of half the
# vocabulary.
_CHUNK_DOUBLES = 8


class Sampler:
    """Draws one token a row: with the native kernel where that is the provider, else as it is defined in torch."""

    def __init__(self) -> None:
        # In which the kernel copies rows that are changed.
        self._copies: NDArray[np.float32] = np.empty(0, dtype=np.float32)

    @staticmethod
    def workspace_bytes(num_rows: int, vocab_size: int) -> int:
        """Bytes that a call with so many rows needs at most, its logits included and its output not: those, a copy of
        what is changed, and per chunk some arrays of doubles (in torch; the kernel takes less)."""
        chunk = min(num_rows, max(1, CHUNK_LOGITS // vocab_size))
        return num_rows * vocab_size * 4 * 2 + chunk * vocab_size * 8 * _CHUNK_DOUBLES

    @staticmethod
    def listed_bytes(num_positions: int, num_logprobs: int) -> int:
        """Bytes of so many PositionLogprobs."""
        return num_positions * (num_logprobs + 1) * _LISTED_BYTES

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Samples.

        Args:
            logits: [rows, vocab_size] float32; the same afterwards as before.
            metadata: what the rows ask.
        """
        if chosen_provider() == "native":
            size = len(metadata.changes) * logits.shape[1]
            if self._copies.size < size:
                self._copies = np.empty(size, dtype=np.float32)
            output: SamplerOutput = _native().sample(logits, metadata, self._copies)
        else:
            output = definition.sample(logits, metadata)
        for row in metadata.changes:
            if output.errors.get(row) == EMPTY:
                output.errors[row] = NO_TOKEN_LEFT
        return output

    @staticmethod
    def score(logits: Tensor, token_ids: NDArray[np.int64], num_logprobs: NDArray[np.int64]) -> SamplerOutput:
        """Logprobs of tokens that are known already, as if they had been sampled.

        Args:
            logits: [rows, vocab_size] float32.
            token_ids: [rows].
            num_logprobs: [rows] as in SamplingMetadata, 0 up.
        """
        score = _native().score if chosen_provider() == "native" else definition.score
        found: SamplerOutput = score(logits, token_ids, num_logprobs)
        return found


@cache
def _native() -> ModuleType:
    """Without a compiler it cannot be imported."""
    from octavo.sample import native

    return native
