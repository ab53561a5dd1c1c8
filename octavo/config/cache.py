"""The paged KV cache."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["CacheConfig"]

_REFUSED_DTYPES = {
    **dict.fromkeys(("bfloat16", "float16", "float32", "half"), "say auto: the data type of --dtype"),
    **dict.fromkeys(("fp8_e5m2", "fp8_inc"), "say fp8: with a scale for each token and head, e4m3 is nearer"),
    "int8_per_token_head": "say int8: its scales are per token and head",
    "fp8_per_token_head": "say fp8: its scales are per token and head",
    "fp8_ds_mla": "octavo has no MLA models yet; say fp8",
    "nvfp4": "octavo keeps no 4-bit KV; say int8 or fp8",
}


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Attributes:

    kv_cache_dtype: resolved: the data type of the model, ``"int8"`` or ``"fp8"``.
    """

    block_size: int = option("tokens in a KV cache block", least=1, most=1024)
    kv_cache_dtype: str = option(
        "data type of the KV cache; auto: the model's; int8 or fp8 (e4m3): half of bfloat16's memory, a scale for "
        "each token's key and value in each head",
        default="auto",
        choices=("auto", "int8", "fp8", "fp8_e4m3"),
        refused=_REFUSED_DTYPES,
    )
    enable_prefix_caching: bool = option("reuse the KV of prompts' common beginnings", default=True)
    memory_share: float = option(
        "share of the memory free after loading that the KV cache may take",
        flag="gpu-memory-utilization",
        least=0.0001,
        most=1,
    )
    kv_cache_memory_bytes: int | None = option(
        "size of the KV cache in bytes, instead of a share of free memory", least=1, most=2**63 - 1
    )
    num_gpu_blocks_override: int | None = option(
        "usable blocks in the KV cache, instead of what memory and lengths give", least=1, most=2**31 - 1
    )
