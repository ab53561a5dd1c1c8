"""The paged KV cache: which block holds what, for whom, and how many there are. Never sees a tensor."""

from octavo.core.kv_cache.block_hash import hash_block, hash_extra_keys, hash_root_key
from octavo.core.kv_cache.block_pool import BlockPool, FreeBlockQueue, KVCacheBlock
from octavo.core.kv_cache.coordinator import KVCacheCoordinator
from octavo.core.kv_cache.manager import CacheableRequest, KVCacheManager, PrefixHit
from octavo.core.kv_cache.single_type import FullAttentionManager, SingleTypeKVCacheManager, SlidingWindowManager
from octavo.core.kv_cache.sizing import make_kv_cache_config

__all__ = [
    "BlockPool",
    "CacheableRequest",
    "FreeBlockQueue",
    "FullAttentionManager",
    "KVCacheBlock",
    "KVCacheCoordinator",
    "KVCacheManager",
    "PrefixHit",
    "SingleTypeKVCacheManager",
    "SlidingWindowManager",
    "hash_block",
    "hash_extra_keys",
    "hash_root_key",
    "make_kv_cache_config",
]
