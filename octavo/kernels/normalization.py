"""Normalizations, and what brings rows to another type without one.

The residual stream ([rows, hidden_size] float32) is never rounded: in bfloat16 its many small additions are what costs
most of a model's accuracy. Norms read it and give what the products after them take.
"""

import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = ["cast", "layer_norm", "rms_norm", "rms_norm_add"]


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` in float32, rounded once to ``dtype`` (None: the type of x).
    x: [..., size]; weight: [size], float32 or bfloat16."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).mul_(weight).to(dtype or x.dtype)


@op
def rms_norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    """Adds ``rms_norm(x)`` to the residual, [rows, size] float32, where it is, and returns it: for what is normed after
    a block."""
    return residual.add_(rms_norm.definition(x, weight, eps, torch.float32))


@op
def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x: [rows, size] in another type, rounded to nearest."""
    return x.to(dtype)


@op
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` in float32, rounded once to ``dtype`` (None: the type
    of x). x: [..., size]; weight and bias: [size], or [heads, size] for an x of [..., heads, size]."""
    wide = x.float()
    centered = wide - wide.mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + eps)
    normed = (centered * scale).mul_(weight)
    return (normed if bias is None else normed.add_(bias)).to(dtype or x.dtype)
