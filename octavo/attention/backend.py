"""Attention backends: how a layer's KV lies in its blocks, and which ops read and write it.

To everybody else a KV block is ``page_size_bytes`` opaque bytes; only the backend knows the layout inside. There is one
backend for each kernel set.
"""

from typing import Protocol, cast

import torch
from torch import Tensor

from octavo.errors import UnsupportedError
from octavo.kernels import AttentionMetadata, chosen_provider, paged_attention, reshape_and_cache, rotary_and_cache
from octavo.registry import Registry
from octavo.types import KVCacheSpec

__all__ = ["BACKENDS", "AttentionBackend", "NativeAttentionBackend", "TorchAttentionBackend", "attention_backend"]

BACKENDS = Registry(
    "attention backend",
    {
        "torch": "octavo.attention.backend:TorchAttentionBackend",
        "native": "octavo.attention.backend:NativeAttentionBackend",
    },
)


class AttentionBackend(Protocol):
    """Attributes:

    layout: names the order of a block's bytes; blocks may be moved between caches of the same layout only.
    """

    layout: str

    def view(self, raw: Tensor, spec: KVCacheSpec) -> Tensor:
        """One layer's KV cache over ``raw``: [num_blocks × page_size_bytes] uint8, without a copy."""
        ...

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Rotates query and key by a table (None: not at all), writes the step's keys and values, then attends:
        [num_tokens, heads, head_size] each, like the result."""
        ...


class TorchAttentionBackend:
    """The layout of the ops' definitions. A row is all that is kept of a token's key or value in one head."""

    layout = "kv,token,head,channel"

    def view(self, raw: Tensor, spec: KVCacheSpec) -> Tensor:
        typed = raw.view(torch.float8_e4m3fn if spec.dtype == "fp8" else getattr(torch, spec.dtype))
        row_size = spec.row_bytes // typed.element_size()
        return typed.view(-1, 2, spec.block_size, spec.num_kv_heads, row_size)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        if cos_sin is None:
            reshape_and_cache(key, value, kv_cache, metadata.slot_mapping)
        else:
            query = rotary_and_cache(positions, query, key, value, cos_sin, kv_cache, metadata.slot_mapping)
        return paged_attention(query, kv_cache, metadata, scale, sliding_window, softcap, sinks)


class NativeAttentionBackend(TorchAttentionBackend):
    """The same bytes for a block, in the order of the native kernels (drawn at KVCache in csrc/cpu/kernels.hpp)."""

    layout = "kv,head,tile,channel"

    def view(self, raw: Tensor, spec: KVCacheSpec) -> Tensor:
        if spec.dtype == "bfloat16" and spec.head_size % 2:
            raise UnsupportedError(
                f"heads of {spec.head_size} channels: the native kernels keep bfloat16 keys in pairs of channels; "
                "use --dtype float32"
            )
        return super().view(raw, spec)


def attention_backend() -> AttentionBackend:
    """A new backend for the chosen kernels."""
    return cast(AttentionBackend, BACKENDS.get(chosen_provider())())
