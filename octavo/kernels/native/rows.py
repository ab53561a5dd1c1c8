"""Row-wise kernels: norms, activations, and rows in another type."""

import math

import torch
from torch import Tensor

from octavo import _native
from octavo.kernels.activation import GeluForm
from octavo.kernels.native.tensors import TYPES, check, empty, rows_of

__all__ = ["cast", "gelu", "layer_norm", "rms_norm", "rms_norm_add"]

# The library's names of functions.
_GELU: dict[GeluForm, int] = {"none": 1, "tanh": 2}


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    return _norm(x, weight, None, eps, dtype or x.dtype)


def rms_norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    return _norm(x, weight, None, eps, torch.float32, residual=residual)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    return _norm(x, weight, bias, eps, dtype or x.dtype, center=True)


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
    out = empty(*x.shape, dtype=dtype) if residual is None else residual
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


def gelu(x: Tensor, approximate: GeluForm = "none") -> Tensor:
    x = rows_of(x)
    rows, size = x.shape
    out = empty(rows, size, dtype=x.dtype)
    _native.activation(TYPES[x.dtype], _GELU[approximate], x.data_ptr(), x.stride(0), out.data_ptr(), rows, size)
    return out
