"""Attention over a paged KV cache, and the write into it.

KV cache: [num_blocks, 2, block_size, num_kv_heads, row], a block's keys and then its values. A row is a token's key or
value in a head: ``head_size`` channels in the type of the queries, or codes of 8 bits and their factor (``kv_rows``).
These definitions are what native kernels are tested against: scores, softmax and sums are float32, rounded once at the
end.
"""

import torch
from torch import Tensor

from octavo.kernels.attention_metadata import AttentionMetadata, RowGroup
from octavo.kernels.kv_rows import head_size_of, keep_rows, widen_rows
from octavo.kernels.op import op
from octavo.kernels.rotary import rotary_embedding

__all__ = ["paged_attention", "reshape_and_cache", "rotary_and_cache"]


@op
def reshape_and_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes the step's keys and values ([num_tokens, num_kv_heads, head_size]) to their slots."""
    block_size = kv_cache.shape[2]
    rows = kv_cache.view(-1, *kv_cache.shape[3:]).view(torch.uint8)
    key_rows = _key_rows(slot_mapping, block_size)
    rows.index_copy_(0, key_rows, keep_rows(key, kv_cache.dtype).view(torch.uint8))
    rows.index_copy_(0, key_rows + block_size, keep_rows(value, kv_cache.dtype).view(torch.uint8))


@op
def rotary_and_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Rotates query and key as ``rotary_embedding`` does, writes the key and the value to their slots, and returns the
    query. Shapes are those of ``rotary_embedding`` and ``reshape_and_cache``."""
    query, key = rotary_embedding(positions, query, key, cos_sin)
    reshape_and_cache.definition(key, value, kv_cache, slot_mapping)
    return query


@op
def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the step's rows over their requests' KV, which holds this step's KV already.

    Args:
        query: [num_tokens, num_heads, head_size]; num_heads is a multiple of num_kv_heads, and query heads that share
            a KV head stand together.
        scale: factor of the scores.
        sliding_window: a row looks at itself and the ``sliding_window - 1`` positions before it; None: at all.
        softcap: scores become ``softcap * tanh(scores / softcap)``, after the scale and before rows are hidden.
        sinks: [num_heads] float32: one more score a head, which takes its share of the softmax and adds nothing.

    Returns:
        [num_tokens, num_heads, head_size]; rows of no request are zero.
    """
    output = torch.zeros_like(query)
    for group in metadata.row_groups(kv_cache.shape[2], sliding_window):
        output[group.rows] = _attend(query[group.rows], kv_cache, group, scale, softcap, sinks)
    return output


def _attend(
    query: Tensor, kv_cache: Tensor, group: RowGroup, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """query: [R, Q, num_heads, head_size] → the same shape."""
    block_size, num_kv_heads, head_size = kv_cache.shape[2], kv_cache.shape[3], head_size_of(kv_cache)
    num_requests, num_rows, num_heads, _ = query.shape
    shared = num_heads // num_kv_heads  # query heads of one KV head
    key_rows = _key_rows(group.slots, block_size)
    keys = _gather(kv_cache, key_rows)
    values = _gather(kv_cache, key_rows + block_size)

    # All query heads of a KV head in one product: [R, num_kv_heads, shared × Q, S].
    heads = query.float().view(num_requests, num_rows, num_kv_heads, shared, head_size).permute(0, 2, 3, 1, 4)
    scores = (heads.flatten(2, 3) @ keys.mT).mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if group.hidden is not None:
        per_head = scores.view(num_requests, num_kv_heads, shared, num_rows, -1)
        per_head.masked_fill_(group.hidden[:, None, None], float("-inf"))
    sums = (scores.softmax(dim=-1) @ values).view(num_requests, num_kv_heads, shared, num_rows, head_size)
    if sinks is not None:
        # With Z the sum of the row's exponentials, the sink leaves Z / (Z + exp(sink)) of the result.
        kept = scores.logsumexp(dim=-1).view(sums.shape[:-1]) - sinks.view(num_kv_heads, shared, 1)
        sums = sums * kept.sigmoid().unsqueeze(-1)
    output = sums.permute(0, 3, 1, 2, 4)
    return output.reshape(query.shape).to(query.dtype)


def _key_rows(slots: Tensor, block_size: int) -> Tensor:
    """Rows of the slots' keys in the cache seen as [num_blocks × 2 × block_size] rows; values: block_size further."""
    return slots + slots // block_size * block_size


def _gather(kv_cache: Tensor, rows: Tensor) -> Tensor:
    """[R, S] row numbers → [R, num_kv_heads, S, head_size] float32."""
    num_kv_heads, row_size = kv_cache.shape[3:]
    # index_select over flat rows copies whole rows at a time; plain indexing is several times slower here.
    flat = kv_cache.view(-1, num_kv_heads * row_size).view(torch.uint8)
    found = flat.index_select(0, rows.flatten()).view(kv_cache.dtype)
    return widen_rows(found.view(*rows.shape, num_kv_heads, row_size).transpose(1, 2)).contiguous()
