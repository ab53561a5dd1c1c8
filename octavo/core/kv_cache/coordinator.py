"""KVCacheCoordinator: one request's blocks in all KV cache groups at once.

A prefix hit must be valid for every group, and an allocation is made for all groups or for none.
"""

from collections.abc import Sequence

from octavo.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from octavo.core.kv_cache.single_type import make_manager
from octavo.types import BlockIds, KVCacheGroup

__all__ = ["KVCacheCoordinator"]


class KVCacheCoordinator:
    """Args:

    groups: all with the same block size.
    pool: the blocks of all groups.
    """

    def __init__(self, groups: Sequence[KVCacheGroup], pool: BlockPool) -> None:
        self.pool = pool
        self.managers = [make_manager(group.spec, index, pool) for index, group in enumerate(groups)]

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> tuple[list[KVCacheBlock], ...]:
        """For each group the blocks of the longest beginning that all groups can go on from; all equally long.

        Each group in turn shortens the hit to what it can serve, until none does: a window may be whole at one length
        and broken at a shorter one, so every group must agree to the final length.
        """
        length = max_blocks
        while True:
            hits = []
            for manager in self.managers:
                hits.append(manager.find_hit(block_hashes, length))
                length = len(hits[-1])
            if all(len(hit) == length for hit in hits):
                return tuple(hits)

    def num_blocks_needed(
        self, request_id: str, num_computed_tokens: int, num_tokens: int, hit: Sequence[list[KVCacheBlock]]
    ) -> int:
        """Free blocks that ``allocate`` with the same arguments takes, less those that it sets free first."""
        return sum(
            manager.num_blocks_needed(request_id, num_computed_tokens, num_tokens, blocks)
            for manager, blocks in zip(self.managers, hit, strict=True)
        )

    def take_hit(self, request_id: str, hit: Sequence[list[KVCacheBlock]]) -> None:
        """Begins a request's block tables."""
        for manager, blocks in zip(self.managers, hit, strict=True):
            manager.take_hit(request_id, blocks)

    def allocate(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> BlockIds:
        """Extends a request's block tables to ``num_tokens`` tokens; returns the new ids. Cannot fail half way if
        ``num_blocks_needed`` was at most the number of free blocks."""
        for manager in self.managers:
            manager.let_go(request_id, num_computed_tokens)
        return tuple(manager.extend(request_id, num_tokens) for manager in self.managers)

    def cache_blocks(self, request_id: str, block_hashes: Sequence[bytes], start: int, stop: int) -> None:
        """Makes blocks ``start`` to ``stop - 1`` of a request findable in every group."""
        for manager in self.managers:
            manager.cache_blocks(request_id, block_hashes, start, stop)

    def block_ids(self, request_id: str) -> BlockIds:
        """All blocks of a request, in the order of its tokens."""
        return tuple([block.block_id for block in manager.tables[request_id]] for manager in self.managers)

    def num_blocks_held(self, request_id: str) -> int:
        """Blocks that a request holds, shared ones included."""
        return sum(manager.num_blocks_held(request_id) for manager in self.managers)

    def free(self, request_id: str) -> None:
        """Releases all blocks of a request, the last tokens' first: they are of least use to others."""
        tables = [manager.pop_table(request_id) for manager in self.managers]
        longest = max(map(len, tables))
        for index in range(longest - 1, -1, -1):
            self.pool.release(table[index] for table in tables if index < len(table))
