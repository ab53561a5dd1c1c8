"""The native provider: the C++ kernels of ``csrc/cpu``, given the addresses and sizes of tensors.

A kernel would read whatever memory it is pointed to, so types and sizes are checked here, and what is in index tensors
by the library.

The level (instruction set) is the best that the machine has, or the one that ``OCTAVO_CPU_ISA`` names. Ops that have no
kernel here are computed by their definitions.
"""

from typing import Any

import torch
from torch import Tensor

from octavo import _native, envs
from octavo.errors import ConfigError
from octavo.kernels.activation import GeluForm
from octavo.kernels.attention_metadata import AttentionMetadata
from octavo.kernels.op import Provider
from octavo.kernels.packed_weight import PackedWeight, Weight
from octavo.platforms import current_platform

__all__ = ["available_levels", "native_provider"]

_SILU = 0
_GELU: dict[GeluForm, int] = {"none": 1, "tanh": 2}
_TYPES = {torch.float32: 0, torch.bfloat16: 1}


def available_levels() -> list[str]:
    """Instruction sets that this machine has kernels for, best first."""
    found: list[str] = _native.available_levels()
    return found


def native_provider() -> Provider:
    """The kernels of the chosen level, with as many threads as this process may use.

    Raises:
        ConfigError: OCTAVO_CPU_ISA names a level that is unknown or that this machine cannot run.
    """
    levels = available_levels()
    level = envs.cpu_isa() or levels[0]
    if level not in levels:
        raise ConfigError(f"OCTAVO_CPU_ISA={level!r}: this machine can run {', '.join(levels)} (or torch)")
    _native.choose(level, current_platform().facts().num_threads)
    return Provider(name="native", kernel_set=f"native-{level}", implementations=_KERNELS)


def pack_weight(weight: Tensor) -> PackedWeight:
    out_size, in_size = weight.shape
    kind = _TYPES[weight.dtype]
    data = torch.empty(_native.packed_bytes(kind, out_size, in_size), dtype=torch.uint8)
    weight = weight.contiguous()
    _native.pack(kind, weight.data_ptr(), out_size, in_size, data.data_ptr())
    return PackedWeight(data, (out_size, in_size), weight.dtype)


def _packed(weight: Weight) -> PackedWeight:
    return weight if isinstance(weight, PackedWeight) else pack_weight(weight)


def _check(dtype: torch.dtype, shape: tuple[int, ...] | None, **tensors: Tensor | None) -> None:
    """Each of them, where there is one, is of this type and shape (None: of any) and contiguous."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype or (shape is not None and tensor.shape != shape):
            expected = "" if shape is None else f" {shape}"
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype}{expected}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")


def _rows(x: Tensor) -> Tensor:
    """[rows, …] with rows that are contiguous; their distance is free."""
    size = 1
    for dim in range(x.ndim - 1, 0, -1):
        if x.stride(dim) != size and x.shape[dim] != 1:
            return x.contiguous()
        size *= x.shape[dim]
    return x


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    return _product(x, _packed(weight), bias, x.dtype)


def logits(hidden: Tensor, weight: Weight, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    scores = _product(hidden, _packed(weight), None, torch.float32)
    if scale != 1.0:
        scores.mul_(scale)
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _product(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out_size, in_size = weight.shape
    if x.dtype != weight.dtype or x.shape[-1] != in_size:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, the weight {weight.dtype} {weight.shape}")
    _check(x.dtype, (out_size,), bias=bias)
    x = _rows(x)
    out = torch.empty(x.shape[0], out_size, dtype=dtype)
    _native.linear(
        _TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        weight.data.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        _TYPES[dtype],
        x.shape[0],
        in_size,
        out_size,
    )
    return out


def embedding(token_ids: Tensor, table: Weight, scale: float = 1.0) -> Tensor:
    table = _packed(table)
    out = torch.empty(token_ids.shape[0], table.shape[1], dtype=table.dtype)
    ids = token_ids.contiguous()
    _check(torch.int64, None, token_ids=ids)
    _native.embedding(
        _TYPES[table.dtype],
        ids.data_ptr(),
        table.data.data_ptr(),
        out.data_ptr(),
        ids.shape[0],
        table.shape[1],
        table.shape[0],
    )
    return out if scale == 1.0 else (out.float() * scale).to(out.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, None, weight, None, eps, center=False)[0]


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    return _norm(x, residual, weight, None, eps, center=False, multiplier=multiplier)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return _norm(x, None, weight, bias, eps, center=True)[0]


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
    _check(weight.dtype, (size,) if weight.ndim == 1 else tuple(x.shape[-2:]), weight=weight, bias=bias)
    rows = x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, size)
    out = torch.empty(x.shape, dtype=x.dtype)
    total = x
    if residual is not None:
        residual, total = residual.contiguous(), torch.empty(x.shape, dtype=torch.float32)
        _check(torch.float32, tuple(x.shape), residual=residual)
    _native.norm(
        _TYPES[x.dtype],
        rows.data_ptr(),
        rows.stride(0),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else total.data_ptr(),
        multiplier,
        _TYPES[weight.dtype],
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
    out = torch.empty(rows, size, dtype=x.dtype)
    _native.activation(_TYPES[x.dtype], function, gated, x.data_ptr(), out.data_ptr(), rows, size)
    return out


def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    positions = positions.contiguous()
    _check(torch.int64, (query.shape[0],), positions=positions)
    _check(torch.float32, None, cos_sin=cos_sin)
    return _rotated(positions, query, cos_sin), _rotated(positions, key, cos_sin)


def _rotated(positions: Tensor, x: Tensor, cos_sin: Tensor) -> Tensor:
    x = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    _native.rotary(
        _TYPES[x.dtype],
        positions.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        cos_sin.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        x.shape[2],
        cos_sin.shape[1],
        cos_sin.shape[0],
    )
    return out


def reshape_and_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    key, value, slots = _rows(key), _rows(value), slot_mapping.contiguous()
    num_blocks, _, block_size, num_kv_heads, head_size = kv_cache.shape
    _check(torch.int64, (key.shape[0],), slot_mapping=slots)
    _check(kv_cache.dtype, None, kv_cache=kv_cache)
    _check_heads(kv_cache, (num_kv_heads, head_size), key=key, value=value)
    _native.store_kv(
        _TYPES[kv_cache.dtype],
        kv_cache.data_ptr(),
        num_blocks,
        block_size,
        num_kv_heads,
        head_size,
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        slots.data_ptr(),
        key.shape[0],
    )


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    query = _rows(query)
    num_blocks, _, block_size, num_kv_heads, head_size = kv_cache.shape
    num_rows, num_heads, _ = query.shape
    starts, lengths = metadata.query_start_loc.contiguous(), metadata.seq_lens.contiguous()
    table = metadata.block_table
    table = table if table.stride(1) == 1 else table.contiguous()
    wide_sinks = None if sinks is None else sinks.float().contiguous()
    _check(kv_cache.dtype, None, kv_cache=kv_cache)
    _check_heads(kv_cache, (num_heads, head_size), query=query)
    _check(torch.int32, None, query_start_loc=starts, seq_lens=lengths)
    if table.dtype != torch.int32 or not len(starts) - 1 == len(lengths) == len(table):
        raise ValueError(f"block_table is {table.dtype} {tuple(table.shape)}, expected int32 and {len(lengths)} rows")
    _check(torch.float32, (num_heads,), sinks=wide_sinks)
    out = torch.empty(query.shape, dtype=query.dtype)
    _native.attention(
        _TYPES[kv_cache.dtype],
        kv_cache.data_ptr(),
        num_blocks,
        block_size,
        num_kv_heads,
        head_size,
        query.data_ptr(),
        query.stride(0),
        out.data_ptr(),
        starts.data_ptr(),
        lengths.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        table.shape[1],
        lengths.shape[0],
        num_rows,
        num_heads,
        scale,
        sliding_window or 0,
        softcap or 0.0,
        0 if wide_sinks is None else wide_sinks.data_ptr(),
    )
    return out


def _check_heads(kv_cache: Tensor, shape: tuple[int, int], **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != kv_cache.dtype or tensor.shape[1:] != shape:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {kv_cache.dtype} and heads {shape}"
            )


_KERNELS: dict[str, Any] = {
    each.__name__: each
    for each in (
        pack_weight,
        linear,
        logits,
        embedding,
        rms_norm,
        fused_add_rms_norm,
        layer_norm,
        fused_add_layer_norm,
        silu_and_mul,
        gelu_and_mul,
        gelu,
        rotary_embedding,
        reshape_and_cache,
        paged_attention,
    )
}
