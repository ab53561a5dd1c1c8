"""RMSNorm, together with the residual addition that comes before it in a decoder layer."""

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.layers.parameter import WeightParameter

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = WeightParameter((hidden_size,), dtype)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(normed x + residual in the type of x, x + residual in float32); without a residual x stands for the sum."""
        if residual is None:
            return kernels.rms_norm(x, self.weight, self.eps), x.float()
        return kernels.fused_add_rms_norm(x, residual, self.weight, self.eps)
