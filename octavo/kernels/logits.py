"""Scores of the vocabulary, kept in float32: bfloat16 would make exact ties of what are close candidates."""

import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = ["logits"]

# Rows of the weight widened at once; such a piece stays in a core's L2 cache between widening and product.
_PIECE_ROWS = 1024


@op
def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """``hidden @ weight.T`` in float32, never rounded in between. hidden: [rows, hidden_size]; weight: [vocab_size,
    hidden_size]; returns [rows, vocab_size] float32."""
    wide = hidden.float()
    scores = torch.empty(hidden.shape[0], weight.shape[0], dtype=torch.float32, device=hidden.device)
    for start in range(0, weight.shape[0], _PIECE_ROWS):
        piece = weight[start : start + _PIECE_ROWS]
        scores[:, start : start + _PIECE_ROWS] = wide @ piece.float().T
    return scores
