"""Root mean square normalization, alone and together with the residual addition before it."""

import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = ["fused_add_rms_norm", "rms_norm"]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).mul_(weight).to(x.dtype)


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` in float32, rounded once. x: [rows, hidden_size]; weight: [hidden_size]."""
    return _rms_norm(x, weight, eps)


@op
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum), sum) with sum = x + residual, rounded to the type of x before it is normed.

    So the fused op equals the addition followed by ``rms_norm``, bit for bit.
    """
    total = x + residual
    return _rms_norm(total, weight, eps), total
