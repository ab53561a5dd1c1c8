"""Matrix products with packed weights, and the embedding, which reads the same packed table."""

import torch
from torch import Tensor

from octavo import _native
from octavo.kernels.activation import GateForm
from octavo.kernels.native.rows import gelu_and_mul, silu_and_mul
from octavo.kernels.native.tensors import TYPES, check, empty, rows_of
from octavo.kernels.packed_weight import PackedWeight, Weight

__all__ = ["embedding", "gated_linear", "linear", "linear_add", "logits", "pack_weight"]


def pack_weight(weight: Tensor, gated: bool = False) -> PackedWeight:
    out_size, in_size = weight.shape
    kind = TYPES[weight.dtype]
    data = torch.empty(_native.packed_bytes(kind, out_size, in_size), dtype=torch.uint8)
    weight = weight.contiguous()
    _native.pack(kind, weight.data_ptr(), out_size, in_size, data.data_ptr())
    return PackedWeight(data, (out_size, in_size), weight.dtype, gated)


def _packed(weight: Weight) -> PackedWeight:
    return weight if isinstance(weight, PackedWeight) else pack_weight(weight)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    return _product(x, _packed(weight), bias, x.dtype)


def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, multiplier: float = 1.0) -> Tensor:
    return torch.add(residual, _product(x, _packed(weight), bias, torch.float32), alpha=multiplier)


def gated_linear(x: Tensor, weight: Weight, bias: Tensor | None, activation: GateForm) -> Tensor:
    both = _product(x, _packed(weight), bias, x.dtype)
    if activation == "silu":
        return silu_and_mul(both)
    return gelu_and_mul(both, "tanh" if activation == "gelu_tanh" else "none")


def logits(hidden: Tensor, weight: Weight, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    scores = _product(hidden, _packed(weight), None, torch.float32)
    if scale != 1.0:
        scores.mul_(scale)
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _product(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out_size, in_size = weight.shape
    if x.dtype != weight.dtype or x.shape[-1] != in_size:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, the weight {weight.dtype} {weight.shape}")
    check(x.dtype, (out_size,), bias=bias)
    x = rows_of(x)
    out = empty(x.shape[0], out_size, dtype=dtype)
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
