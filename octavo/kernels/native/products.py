"""Matrix products with packed weights, and the embedding, which reads the same packed table."""

import torch
from torch import Tensor

from octavo import _native
from octavo.kernels.activation import GateForm
from octavo.kernels.native.tensors import TYPES, check, empty, rows_of
from octavo.kernels.packed_weight import PackedWeight, Weight

__all__ = ["embedding", "gated_linear", "linear", "linear_add", "logits", "pack_weight"]


# The library's names of functions.
_FUNCTIONS: dict[GateForm, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def pack_weight(weight: Tensor, gated: bool = False) -> PackedWeight:
    out_size, in_size = weight.shape
    if gated and out_size % 2:
        raise ValueError(f"a gate and an up projection are two halves, got {out_size} outputs")
    kind = TYPES[weight.dtype]
    data = torch.empty(_native.packed_bytes(kind, out_size, in_size, gated), dtype=torch.uint8)
    weight = weight.contiguous()
    _native.pack(kind, weight.data_ptr(), out_size, in_size, gated, data.data_ptr())
    return PackedWeight(data, (out_size, in_size), weight.dtype, gated)


def _packed(weight: Weight, gated: bool = False) -> PackedWeight:
    if not isinstance(weight, PackedWeight):
        return pack_weight(weight, gated)
    if weight.gated != gated:
        raise ValueError(f"the weight was packed with gated={weight.gated}, expected gated={gated}")
    return weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    return _product(x, _packed(weight), bias, x.dtype)


def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, multiplier: float = 1.0) -> Tensor:
    residual = residual.contiguous()
    return _product(x, _packed(weight), bias, torch.float32, residual=residual, multiplier=multiplier)


def gated_linear(x: Tensor, weight: Weight, bias: Tensor | None, activation: GateForm) -> Tensor:
    return _product(x, _packed(weight, gated=True), bias, x.dtype, function=_FUNCTIONS[activation])


def logits(hidden: Tensor, weight: Weight, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    return _product(hidden, _packed(weight), None, torch.float32, multiplier=scale, softcap=softcap or 0.0)


def _product(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    residual: Tensor | None = None,
    multiplier: float = 1.0,
    softcap: float = 0.0,
    function: int = 0,
) -> Tensor:
    out_size, in_size = weight.shape
    if x.dtype != weight.dtype or x.shape[-1] != in_size:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, the weight {weight.dtype} {weight.shape}")
    check(x.dtype, (out_size,), bias=bias)
    check(torch.float32, (x.shape[0], out_size), residual=residual)
    x = rows_of(x)
    out = empty(x.shape[0], out_size // 2 if weight.gated else out_size, dtype=dtype)
    _native.linear(
        TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        weight.data.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        TYPES[dtype],
        x.shape[0],
        in_size,
        out_size,
        0 if residual is None else residual.data_ptr(),
        multiplier,
        softcap,
        weight.gated,
        function,
    )
    return out


def embedding(token_ids: Tensor, table: Weight, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    table = _packed(table)
    out = empty(token_ids.shape[0], table.shape[1], dtype=table.dtype)
    ids = token_ids.contiguous()
    check(torch.int64, None, token_ids=ids)
    _native.embedding(
        TYPES[table.dtype],
        ids.data_ptr(),
        table.data.data_ptr(),
        out.data_ptr(),
        ids.shape[0],
        table.shape[1],
        table.shape[0],
    )
    scaled = out if scale == 1.0 else out.float() * scale
    return scaled.to(dtype or out.dtype)
