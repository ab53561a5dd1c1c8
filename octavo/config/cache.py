"""The paged KV cache."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["CacheConfig"]


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    block_size: int = option("tokens in a KV cache block")
    enable_prefix_caching: bool = option("reuse the KV of prompts' common beginnings", default=True)
    memory_share: float = option(
        "share of the memory free after loading that the KV cache may take", flag="gpu-memory-utilization"
    )
    kv_cache_memory_bytes: int | None = option("size of the KV cache in bytes, instead of a share of free memory")
    num_gpu_blocks_override: int | None = option(
        "usable blocks in the KV cache, instead of what memory and lengths give"
    )
