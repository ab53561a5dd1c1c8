"""How the KV cache is cut into blocks, groups and tensors."""

import msgspec

__all__ = ["FullAttentionSpec", "KVCacheConfig", "KVCacheGroup", "KVCacheSpec", "KVCacheTensor", "SlidingWindowSpec"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
# A float32 beside the 8 bits of each channel.
FACTOR_BYTES = {"int8": 4, "fp8": 4}


class _AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one attention layer keeps for a token.

    Attributes:
        block_size: tokens in a block.
        num_kv_heads, head_size: shape of K and of V for one token.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"int8"`` or ``"fp8"`` (e4m3fn).
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K, or of its V, in one head."""
        return self.head_size * DTYPE_BYTES[self.dtype] + FACTOR_BYTES.get(self.dtype, 0)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: K and V."""
        return 2 * self.block_size * self.num_kv_heads * self.row_bytes


class FullAttentionSpec(_AttentionSpec, frozen=True, kw_only=True, tag="full"):
    """Every token attends to all tokens before it."""

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """Blocks that a request of ``num_tokens`` holds at most, at any moment."""
        return -(-num_tokens // self.block_size)


class SlidingWindowSpec(_AttentionSpec, frozen=True, kw_only=True, tag="sliding_window"):
    """Every token attends to itself and the ``sliding_window - 1`` tokens before it."""

    sliding_window: int

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """Blocks that a request of ``num_tokens`` holds at most, at any moment: the window behind one chunk, the
        chunk, and one block more because the window may begin in the middle of one."""
        held = min(self.sliding_window - 1 + max_num_batched_tokens, num_tokens)
        return min(-(-held // self.block_size) + 1, -(-num_tokens // self.block_size))


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers that share one block table: same spec, same blocks."""

    layer_names: list[str]
    spec: KVCacheSpec


class KVCacheTensor(msgspec.Struct, frozen=True):
    """One allocation of ``size`` bytes, used by one layer of each group (their blocks never overlap)."""

    size: int
    shared_by: list[str]


class KVCacheConfig(msgspec.Struct, frozen=True):
    """The whole cache. Block 0 is the null block: it stands for blocks that a sliding window has left behind, is
    never written and never read.

    Attributes:
        num_blocks: blocks in the pool, the null block included.
        tensors: what the worker allocates.
        groups: what the scheduler sees; block ids travel per group, in this order.
    """

    num_blocks: int
    tensors: list[KVCacheTensor]
    groups: list[KVCacheGroup]
