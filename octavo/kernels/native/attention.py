"""Attention over the paged KV cache, and what is written into it."""

import torch
from torch import Tensor

from octavo import _native
from octavo.kernels.attention_metadata import AttentionMetadata
from octavo.kernels.kv_rows import head_size_of
from octavo.kernels.native.tensors import TYPES, check, empty, rows_of

__all__ = ["paged_attention", "reshape_and_cache", "rotary_and_cache"]

# The library's names of what a cache keeps; 0: the type of what comes.
_KEPT = {torch.int8: 1, torch.float8_e4m3fn: 2}


def rotary_and_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    query, key, value = rows_of(query), rows_of(key), rows_of(value)
    positions, slots = positions.contiguous(), slot_mapping.contiguous()
    num_rows, num_heads, _ = query.shape
    check(torch.int64, (num_rows,), positions=positions, slot_mapping=slots)
    check(torch.float32, None, cos_sin=cos_sin)
    cache = _cache(kv_cache, query.dtype)
    _check_heads(kv_cache, query.dtype, (num_rows, num_heads), query=query)
    _check_heads(kv_cache, query.dtype, (num_rows, kv_cache.shape[3]), key=key, value=value)
    out = empty(*query.shape, dtype=query.dtype)
    _native.rotary_kv(
        cache,
        positions.data_ptr(),
        query.data_ptr(),
        query.stride(0),
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        cos_sin.data_ptr(),
        slots.data_ptr(),
        out.data_ptr(),
        num_rows,
        num_heads,
        cos_sin.shape[1],
        cos_sin.shape[0],
    )
    return out


def reshape_and_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    key, value, slots = rows_of(key), rows_of(value), slot_mapping.contiguous()
    check(torch.int64, (key.shape[0],), slot_mapping=slots)
    cache = _cache(kv_cache, key.dtype)
    _check_heads(kv_cache, key.dtype, (key.shape[0], kv_cache.shape[3]), key=key, value=value)
    _native.store_kv(
        cache,
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
    query = rows_of(query)
    num_rows, num_heads, _ = query.shape
    starts, lengths = metadata.query_start_loc.contiguous(), metadata.seq_lens.contiguous()
    table = metadata.block_table
    table = table if table.stride(1) == 1 else table.contiguous()
    wide_sinks = None if sinks is None else sinks.float().contiguous()
    cache = _cache(kv_cache, query.dtype)
    _check_heads(kv_cache, query.dtype, (num_rows, num_heads), query=query)
    check(torch.int32, None, query_start_loc=starts, seq_lens=lengths)
    if table.dtype != torch.int32 or not len(starts) - 1 == len(lengths) == len(table):
        raise ValueError(f"block_table is {table.dtype} {tuple(table.shape)}, expected int32 and {len(lengths)} rows")
    check(torch.float32, (num_heads,), sinks=wide_sinks)
    out = empty(*query.shape, dtype=query.dtype)
    _native.attention(
        cache,
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


def _cache(kv_cache: Tensor, dtype: torch.dtype) -> tuple[int, int, int, int, int, int, int]:
    """A cache for queries, keys and values of this type, as the library takes it."""
    kept = _KEPT.get(kv_cache.dtype, 0)
    check(kv_cache.dtype if kept else dtype, None, kv_cache=kv_cache)
    num_blocks, _, block_size, num_kv_heads, _ = kv_cache.shape
    return TYPES[dtype], kept, kv_cache.data_ptr(), num_blocks, block_size, num_kv_heads, head_size_of(kv_cache)


def _check_heads(kv_cache: Tensor, dtype: torch.dtype, rows: tuple[int, int], **tensors: Tensor) -> None:
    shape = (*rows, head_size_of(kv_cache))
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")
