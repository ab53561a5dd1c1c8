"""Normalizations, alone and together with the residual addition before them; and that addition alone.

The residual stream ([rows, hidden_size] float32) is never rounded: in bfloat16 its many small additions are what costs
most of a model's accuracy.
"""

import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = [
    "add_to_residual",
    "cast",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "rms_norm",
    "rms_norm_add",
]


def _rms_norm(wide: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).mul_(weight).to(dtype)


def _layer_norm(wide: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    centered = wide - wide.mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + eps)
    normed = (centered * scale).mul_(weight)
    return (normed if bias is None else normed.add_(bias)).to(dtype)


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` in float32, rounded once to ``dtype`` (None: the type of x).
    x: [..., size]; weight: [size], float32 or bfloat16."""
    return _rms_norm(x.float(), weight, eps, dtype or x.dtype)


@op
def rms_norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    """``residual + rms_norm(x)`` in float32: for what is normed after a block. residual: [rows, size] float32."""
    return residual + _rms_norm(x.float(), weight, eps, torch.float32)


@op
def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x: [rows, size] in another type, rounded to nearest."""
    return x.to(dtype)


@op
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum) in the type of x, sum in float32) with sum = residual + x * multiplier."""
    total = torch.add(residual, x, alpha=multiplier)
    return _rms_norm(total, weight, eps, x.dtype), total


@op
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` in float32, rounded once to ``dtype`` (None: the type
    of x). x: [..., size]; weight and bias: [size], or [heads, size] for an x of [..., heads, size]."""
    return _layer_norm(x.float(), weight, bias, eps, dtype or x.dtype)


@op
def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(sum) in the type of x, sum in float32) with sum = residual + x."""
    total = residual + x
    return _layer_norm(total, weight, bias, eps, x.dtype), total


@op
def add_to_residual(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(sum in the type of x, sum in float32) with sum = residual + x: where no norm follows the addition."""
    total = residual + x
    return total.to(x.dtype), total
