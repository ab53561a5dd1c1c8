"""Norms: of the float32 residual stream on its way into a block, of a block's output on its way back, and of heads."""

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.layers.parameter import WeightParameter

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(nn.Module):
    """Args:

    dtype: of what comes out.
    weight_offset: what is added to the checkpoint's weights (Gemma's say how far they are from 1). The sum stays in
        float32: bfloat16 would round it.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, *, weight_offset: float = 0.0) -> None:
        super().__init__()
        self.weight = WeightParameter((size,), torch.float32 if weight_offset else dtype, offset=weight_offset)
        self.eps = eps
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., size], in float32 or the norm's type → the same shape in the norm's type."""
        return kernels.rms_norm(x, self.weight, self.eps, self.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """The residual, float32, to which normed x was added: for what is normed after a block."""
        return kernels.rms_norm_add(x, self.weight, self.eps, residual)


class LayerNorm(nn.Module):
    """Args:

    dtype: of what comes out.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.weight = WeightParameter((size,), dtype)
        self.bias = WeightParameter((size,), dtype) if bias else None
        self.eps = eps
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., size], in float32 or the norm's type → the same shape in the norm's type."""
        return kernels.layer_norm(x, self.weight, self.bias, self.eps, self.dtype)
