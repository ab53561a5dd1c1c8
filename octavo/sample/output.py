"""What the sampler gives back."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.types import PositionLogprobs

__all__ = ["EMPTY", "NAN", "SamplerOutput"]

NAN = "the model computed NaN logits for this request"
EMPTY = "the model computed logits of -inf only for this request"


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
