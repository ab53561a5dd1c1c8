"""Norms, together with the residual addition that comes before them in a decoder layer."""

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.layers.parameter import WeightParameter

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(nn.Module):
    """Args:

    weight_offset: what is added to the checkpoint's weights (Gemma's say how far they are from 1). The sum stays in
        float32: bfloat16 would round it.
    residual_multiplier: factor of x where it is added to the residual.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        *,
        weight_offset: float = 0.0,
        residual_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = WeightParameter((size,), torch.float32 if weight_offset else dtype, offset=weight_offset)
        self.eps = eps
        self.residual_multiplier = residual_multiplier

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(normed x + residual in the type of x, x + residual in float32); without a residual x stands for the sum."""
        if residual is None:
            return self.normed(x), x.float()
        return kernels.fused_add_rms_norm(x, residual, self.weight, self.eps, self.residual_multiplier)

    def normed(self, x: Tensor) -> Tensor:
        """x alone: [..., size] → the same shape and type. For heads, and for what is normed after a block."""
        return kernels.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.weight = WeightParameter((size,), dtype)
        self.bias = WeightParameter((size,), dtype) if bias else None
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(normed x + residual in the type of x, x + residual in float32); without a residual x stands for the sum."""
        if residual is None:
            return self.normed(x), x.float()
        return kernels.fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def normed(self, x: Tensor) -> Tensor:
        """x alone: [..., size] → the same shape and type."""
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)
