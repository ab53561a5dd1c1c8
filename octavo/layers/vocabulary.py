"""Both ends of a model: token ids → vectors, vectors → logits. A tied head is the embedding's weight, stored once."""

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.layers.parameter import WeightParameter

__all__ = ["ParallelLMHead", "VocabParallelEmbedding"]


class VocabParallelEmbedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = WeightParameter((vocab_size, hidden_size), dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 → [num_tokens, hidden_size]."""
        return kernels.embedding(token_ids, self.weight)


class ParallelLMHead(nn.Module):
    """Args:

    tied_to: the embedding whose weight is the head's too.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, *, tied_to: VocabParallelEmbedding | None = None
    ) -> None:
        super().__init__()
        self.weight = WeightParameter((vocab_size, hidden_size), dtype) if tied_to is None else tied_to.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] float32."""
        return kernels.logits(hidden, self.weight)
