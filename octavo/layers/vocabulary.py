"""Both ends of a model: token ids → vectors, vectors → logits. A tied head is the embedding's weight, stored once."""

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.layers.parameter import WeightParameter

__all__ = ["ParallelLMHead", "VocabParallelEmbedding"]


class VocabParallelEmbedding(nn.Module):
    """Args:

    scale: factor of the vectors.
    """

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = WeightParameter((vocab_size, hidden_size), dtype, matrix=True, vocabulary=True)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 → [num_tokens, hidden_size] float32: the residual stream begins here."""
        return kernels.embedding(token_ids, self.weight.packed, self.scale, torch.float32)


class ParallelLMHead(nn.Module):
    """Args:

    tied_to: the embedding whose weight is the head's too.
    scale: factor of the logits.
    soft_cap: squeezes the scaled logits smoothly into ± this; None: they are left.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        tied_to: VocabParallelEmbedding | None = None,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.soft_cap = soft_cap
        if tied_to is None:
            self.weight = WeightParameter((vocab_size, hidden_size), dtype, matrix=True, vocabulary=True)
        else:
            self.weight = tied_to.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] float32."""
        return kernels.logits(hidden, self.weight.packed, self.scale, self.soft_cap)
