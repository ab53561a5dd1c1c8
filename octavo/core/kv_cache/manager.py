"""KVCacheManager: all of the paged KV cache that the scheduler sees.

Looking up changes nothing; allocating first checks that all groups can be served, then changes state; blocks become
findable only when the scheduler says that their tokens have really been computed.
"""

from dataclasses import dataclass
from typing import Protocol

from octavo.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from octavo.core.kv_cache.coordinator import KVCacheCoordinator
from octavo.types import BlockIds, KVCacheConfig

__all__ = ["CacheableRequest", "KVCacheManager", "PrefixHit"]

NO_NEW_BLOCKS: BlockIds = ()


class CacheableRequest(Protocol):
    """What the cache must know of a request.

    Attributes:
        num_tokens: tokens whose ids are known.
        num_computed_tokens: leading tokens that are computed when the step begins that is being made up.
        block_hashes: of its leading full blocks of known tokens, as far as they were asked for.
    """

    request_id: str
    num_computed_tokens: int
    block_hashes: list[bytes]

    @property
    def num_tokens(self) -> int: ...

    def extend_block_hashes(self) -> None:
        """Brings ``block_hashes`` up to all full blocks of known tokens."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The beginning of a request whose KV is in the cache.

    Attributes:
        blocks: for each group, one a block of tokens; the null block where the group doesn't need it any more.
    """

    blocks: tuple[list[KVCacheBlock], ...]
    num_tokens: int


@dataclass(slots=True)
class _Progress:
    """How far a request's blocks reach: tokens that have a place, blocks that were made findable."""

    num_slots: int
    num_cached_blocks: int


class KVCacheManager:
    """Args:

    config: blocks and groups; all groups have one block size.
    max_num_batched_tokens: most tokens of one allocation.
    enable_caching: False: nothing is ever looked up, hashed or found.

    Attributes:
        no_hit: where a request begins that the cache supplies nothing of.
    """

    def __init__(self, config: KVCacheConfig, max_num_batched_tokens: int, enable_caching: bool) -> None:
        self.block_size = config.groups[0].spec.block_size
        self.enable_caching = enable_caching
        self.pool = BlockPool(config.num_blocks, len(config.groups))
        self.coordinator = KVCacheCoordinator(config.groups, self.pool)
        self._specs = [group.spec for group in config.groups]
        self._max_num_batched_tokens = max_num_batched_tokens
        self._progress: dict[str, _Progress] = {}
        self.no_hit = PrefixHit(tuple([] for _ in config.groups), 0)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return self.pool.usage

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable_blocks

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks that a request holds at most while ``num_tokens`` tokens of it are computed."""
        return sum(spec.max_blocks(num_tokens, self._max_num_batched_tokens) for spec in self._specs)

    def num_blocks_to_come(self, request: CacheableRequest) -> int:
        """Blocks beyond those it holds that the request's known tokens may still need."""
        missing = self.max_blocks(request.num_tokens) - self.coordinator.num_blocks_held(request.request_id)
        return max(0, missing)

    def get_computed_blocks(self, request: CacheableRequest) -> PrefixHit:
        """The longest cached beginning of the request, in whole blocks and at least one token short of all of it:
        the last token must be computed, to sample from."""
        if not self.enable_caching:
            return self.no_hit
        request.extend_block_hashes()
        most = (request.num_tokens - 1) // self.block_size
        hit = self.coordinator.find_longest_hit(request.block_hashes, most)
        return PrefixHit(hit, len(hit[0]) * self.block_size)

    def allocate_slots(
        self, request: CacheableRequest, num_new_tokens: int, hit: PrefixHit | None = None, headroom: int = 0
    ) -> BlockIds | None:
        """Gives the next ``num_new_tokens`` tokens of a request their places.

        Args:
            hit: for a request that has no blocks yet: where it begins.
            headroom: blocks that must still be free afterwards.

        Returns:
            Ids of the blocks that were added (without the hit's), for each group; ``()`` where the blocks at hand
            suffice; None, and nothing is changed, where there are too few free blocks.
        """
        request_id = request.request_id
        progress = self._progress.get(request_id)
        if progress is None:
            return self._begin(request_id, num_new_tokens, hit if hit is not None else self.no_hit, headroom)
        computed = request.num_computed_tokens
        num_tokens = computed + num_new_tokens
        if num_tokens <= progress.num_slots:
            return NO_NEW_BLOCKS
        needed = self.coordinator.num_blocks_needed(request_id, computed, num_tokens, self.no_hit.blocks)
        if needed + headroom > self.pool.num_free_blocks:
            return None
        progress.num_slots = -(-num_tokens // self.block_size) * self.block_size
        return self.coordinator.allocate(request_id, computed, num_tokens)

    def _begin(self, request_id: str, num_new_tokens: int, hit: PrefixHit, headroom: int) -> BlockIds | None:
        num_tokens = hit.num_tokens + num_new_tokens
        needed = self.coordinator.num_blocks_needed(request_id, hit.num_tokens, num_tokens, hit.blocks)
        if needed + headroom > self.pool.num_free_blocks:
            return None
        num_slots = -(-num_tokens // self.block_size) * self.block_size
        self._progress[request_id] = _Progress(num_slots, hit.num_tokens // self.block_size)
        self.coordinator.take_hit(request_id, hit.blocks)
        return self.coordinator.allocate(request_id, hit.num_tokens, num_tokens)

    def cache_blocks(self, request: CacheableRequest, num_tokens: int) -> None:
        """Makes the full blocks among the first ``num_tokens`` tokens findable; those tokens must be computed."""
        if not self.enable_caching:
            return
        progress = self._progress[request.request_id]
        start, stop = progress.num_cached_blocks, num_tokens // self.block_size
        if stop > start:
            progress.num_cached_blocks = stop
            request.extend_block_hashes()
            self.coordinator.cache_blocks(request.request_id, request.block_hashes, start, stop)

    def forget(self, request: CacheableRequest) -> None:
        """Makes all of a request's blocks, and others of the same content, unfindable: what was computed is wrong."""
        for block_hash in request.block_hashes:
            self.pool.forget(block_hash)

    def block_ids(self, request_id: str) -> BlockIds:
        """All blocks of a request, for each group."""
        return self.coordinator.block_ids(request_id)

    def free(self, request: CacheableRequest) -> None:
        """Lets go of all blocks of a request; what is cached in them stays findable until they are reused."""
        del self._progress[request.request_id]
        self.coordinator.free(request.request_id)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False while blocks are in use."""
        return self.pool.reset()
