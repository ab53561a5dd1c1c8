"""Root mean square normalization, alone and together with the residual addition before it."""

import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = ["fused_add_rms_norm", "rms_norm"]


def _rms_norm(wide: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).mul_(weight).to(dtype)


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` in float32, rounded once. x: [rows, hidden_size]; weight: [hidden_size]."""
    return _rms_norm(x.float(), weight, eps, x.dtype)


@op
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum) in the type of x, sum in float32) with sum = x + residual.

    The residual stream ([rows, hidden_size] float32) is never rounded: in bfloat16 its many small additions are what
    costs most of a model's accuracy.
    """
    total = residual + x
    return _rms_norm(total, weight, eps, x.dtype), total
