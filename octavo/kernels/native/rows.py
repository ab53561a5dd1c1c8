"""Row-wise kernels: norms and activations."""

import torch
from torch import Tensor

from octavo import _native
from octavo.kernels.activation import GeluForm
from octavo.kernels.native.tensors import TYPES, check, empty

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
    return _norm(x, None, weight, None, eps, center=False)[0].to(dtype or x.dtype)


def rms_norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    return residual + rms_norm(x.float(), weight, eps)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    return _norm(x, residual, weight, None, eps, center=False, multiplier=multiplier)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    return _norm(x, None, weight, bias, eps, center=True)[0].to(dtype or x.dtype)


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return _norm(x, residual, weight, bias, eps, center=True)


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    center: bool,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(normed, sum); without a residual the sum is x."""
    size = x.shape[-1]
    # A weight for all rows, or one for each head.
    check(weight.dtype, (size,) if weight.ndim == 1 else tuple(x.shape[-2:]), weight=weight, bias=bias)
    rows = x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, size)
    out = empty(*x.shape, dtype=x.dtype)
    total = x
    if residual is not None:
        residual, total = residual.contiguous(), empty(*x.shape, dtype=torch.float32)
        check(torch.float32, tuple(x.shape), residual=residual)
    _native.norm(
        TYPES[x.dtype],
        rows.data_ptr(),
        rows.stride(0),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else total.data_ptr(),
        multiplier,
        TYPES[weight.dtype],
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        weight.numel() // size,
        out.data_ptr(),
        rows.shape[0],
        size,
        eps,
        center,
    )
    return out, total


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
