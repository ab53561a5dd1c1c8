"""Row-wise kernels: norms, activations, and rows in another type."""

import math

import torch
from torch import Tensor

from octavo import _native
from octavo.kernels.activation import GeluForm
from octavo.kernels.native.tensors import TYPES, check, empty, rows_of

__all__ = [
    "cast",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "gelu",
    "gelu_and_mul",
    "layer_norm",
    "rms_norm",
    "rms_norm_add",
    "silu_and_mul",
]

_SILU = 0
_GELU: dict[GeluForm, int] = {"none": 1, "tanh": 2}


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    return _norm(x, weight, None, eps, dtype or x.dtype)


def rms_norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    return _norm(x, weight, None, eps, torch.float32, residual=residual)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    total = torch.add(residual, x, alpha=multiplier)
    return rms_norm(total, weight, eps, x.dtype), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    return _norm(x, weight, bias, eps, dtype or x.dtype, center=True)


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = residual + x
    return layer_norm(total, weight, bias, eps, x.dtype), total


def _norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    *,
    residual: Tensor | None = None,
    center: bool = False,
) -> Tensor:
    size = x.shape[-1]
    # A weight for all heads of a row, or one for each.
    check(weight.dtype, (size,) if weight.ndim == 1 else tuple(x.shape[-2:]), weight=weight, bias=bias)
    check(torch.float32, tuple(x.shape), residual=residual)
    x = rows_of(x)
    out = empty(*x.shape, dtype=dtype)
    _native.norm(
        TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        TYPES[weight.dtype],
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        weight.ndim > 1,
        0 if residual is None else residual.data_ptr(),
        TYPES[dtype],
        out.data_ptr(),
        x.shape[0],
        math.prod(x.shape[1:-1]),
        size,
        eps,
        center,
    )
    return out


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = rows_of(x)
    out = empty(*x.shape, dtype=dtype)
    _native.cast(
        TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        TYPES[dtype],
        out.data_ptr(),
        x.shape[0],
        math.prod(x.shape[1:]),
    )
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    return _activation(x, _SILU, gated=True)


def gelu_and_mul(x: Tensor, approximate: GeluForm = "none") -> Tensor:
    return _activation(x, _GELU[approximate], gated=True)


def gelu(x: Tensor, approximate: GeluForm = "none") -> Tensor:
    return _activation(x, _GELU[approximate], gated=False)


def _activation(x: Tensor, function: int, *, gated: bool) -> Tensor:
    x = x.contiguous()
    rows, size = x.shape
    if gated:
        if size % 2:
            raise ValueError(f"a gate and an up projection are two halves, got {size} channels")
        size //= 2
    out = empty(rows, size, dtype=x.dtype)
    _native.activation(TYPES[x.dtype], function, gated, x.data_ptr(), out.data_ptr(), rows, size)
    return out
