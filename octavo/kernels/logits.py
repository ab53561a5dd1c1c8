"""Scores of the vocabulary, kept in float32: bfloat16 would make exact ties of what are close candidates."""

import torch
from torch import Tensor

from octavo.kernels.op import op
from octavo.kernels.packed_weight import Weight, plain

__all__ = ["logits"]

# Rows of the weight widened at once; such a piece stays in a core's L2 cache between widening and product.
_PIECE_ROWS = 1024


@op
def logits(hidden: Tensor, weight: Weight, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """``hidden @ weight.T * scale`` in float32, never rounded in between.

    Args:
        hidden: [rows, hidden_size].
        weight: [vocab_size, hidden_size].
        softcap: squeezes scores smoothly into ±softcap: ``softcap * tanh(scores / softcap)``, after the scale.

    Returns:
        [rows, vocab_size] float32.
    """
    wide, weight = hidden.float(), plain(weight)
    scores = torch.empty(hidden.shape[0], weight.shape[0], dtype=torch.float32, device=hidden.device)
    for start in range(0, weight.shape[0], _PIECE_ROWS):
        piece = weight[start : start + _PIECE_ROWS]
        scores[:, start : start + _PIECE_ROWS] = wide @ piece.float().T
    if scale != 1.0:
        scores.mul_(scale)
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)
