"""Block tables of one KV cache group, for each kind of attention: what is held, found again and let go.

A manager answers what an allocation would need before anything changes; then the coordinator commits for all groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from octavo.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from octavo.types import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

__all__ = ["FullAttentionManager", "SingleTypeKVCacheManager", "SlidingWindowManager", "make_manager"]


class SingleTypeKVCacheManager(ABC):
    """Args:

    spec: what the group's layers keep.
    group_index: the group's place in KVCacheConfig.groups.
    pool: shared by all groups.

    Attributes:
        tables: request id → its blocks, in the order of the tokens they hold.
    """

    def __init__(self, spec: KVCacheSpec, group_index: int, pool: BlockPool) -> None:
        self.block_size = spec.block_size
        self.group_index = group_index
        self.pool = pool
        self.tables: dict[str, list[KVCacheBlock]] = {}

    @abstractmethod
    def find_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> list[KVCacheBlock]:
        """Blocks that stand for the longest beginning, of at most ``max_blocks`` blocks, after which computing can
        go on; the null block where a block isn't needed for that. Changes nothing."""

    @abstractmethod
    def passed_blocks(self, request_id: str, num_computed_tokens: int) -> range:
        """Indices in the request's table of blocks that no token from ``num_computed_tokens`` on attends to."""

    def num_blocks_needed(
        self, request_id: str, num_computed_tokens: int, num_tokens: int, hit: Sequence[KVCacheBlock]
    ) -> int:
        """Free blocks that it takes to hold ``num_tokens`` tokens; negative if more are let go than taken."""
        table = self.tables.get(request_id, hit)
        taken = -(-num_tokens // self.block_size) - len(table)
        null = self.pool.null_block
        revived = sum(block.ref_count == 0 and block is not null for block in hit)
        passed = self.passed_blocks(request_id, num_computed_tokens)
        return max(0, taken) + revived - sum(table[index].ref_count == 1 for index in passed)

    def num_blocks_held(self, request_id: str) -> int:
        """Blocks in the request's table, shared ones included."""
        return len(self.tables[request_id])

    def let_go(self, request_id: str, num_computed_tokens: int) -> None:
        """Releases the passed blocks; the null block takes their places."""
        passed = self.passed_blocks(request_id, num_computed_tokens)
        if passed:
            table = self.tables[request_id]
            self.pool.release([table[index] for index in reversed(passed)])
            table[passed.start : passed.stop] = [self.pool.null_block] * len(passed)

    def take_hit(self, request_id: str, hit: Sequence[KVCacheBlock]) -> None:
        """Begins the request's table with the blocks of a prefix hit."""
        self.pool.touch(hit)
        self.tables[request_id] = list(hit)

    def extend(self, request_id: str, num_tokens: int) -> list[int]:
        """Takes new blocks so that ``num_tokens`` tokens have a place; returns their ids."""
        table = self.tables[request_id]
        new = self.pool.get_new_blocks(max(0, -(-num_tokens // self.block_size) - len(table)))
        table.extend(new)
        return [block.block_id for block in new]

    def cache_blocks(self, request_id: str, block_hashes: Sequence[bytes], start: int, stop: int) -> None:
        """Makes the computed blocks ``start`` to ``stop - 1`` of the request findable."""
        table = self.tables[request_id]
        for index in range(start, stop):
            self.pool.cache_block(table[index], block_hashes[index], self.group_index)

    def pop_table(self, request_id: str) -> list[KVCacheBlock]:
        """Forgets the request; its blocks are the caller's to release."""
        return self.tables.pop(request_id)


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every token attends to all before it: nothing is let go, a hit is the longest unbroken beginning."""

    def find_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> list[KVCacheBlock]:
        hit = []
        for index in range(max_blocks):
            block = self.pool.get_cached_block(block_hashes[index], self.group_index)
            if block is None:
                break
            hit.append(block)
        return hit

    def passed_blocks(self, request_id: str, num_computed_tokens: int) -> range:
        return range(0)


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Every token attends to itself and ``sliding_window - 1`` tokens before it: blocks behind the window are let go,
    and a hit needs only the blocks inside the window of the token that comes next."""

    def __init__(self, spec: SlidingWindowSpec, group_index: int, pool: BlockPool) -> None:
        super().__init__(spec, group_index, pool)
        self.sliding_window = spec.sliding_window
        self._num_passed: dict[str, int] = {}

    def find_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> list[KVCacheBlock]:
        # The first token after a hit of n blocks sees this many blocks before it, or all if there are fewer.
        window_blocks = max(1, -(-(self.sliding_window - 1) // self.block_size))
        found: list[KVCacheBlock] = []  # the unbroken run that ends where the hit would end, last block first
        for index in range(max_blocks - 1, -1, -1):
            block = self.pool.get_cached_block(block_hashes[index], self.group_index)
            if block is None:
                found.clear()
                continue
            found.append(block)
            if len(found) == window_blocks:
                return [self.pool.null_block] * index + found[::-1]
        return found[::-1]

    def passed_blocks(self, request_id: str, num_computed_tokens: int) -> range:
        first_needed = max(0, num_computed_tokens - self.sliding_window + 1) // self.block_size
        done = self._num_passed.get(request_id, first_needed)
        return range(done, max(done, first_needed))

    def num_blocks_held(self, request_id: str) -> int:
        return super().num_blocks_held(request_id) - self._num_passed[request_id]

    def let_go(self, request_id: str, num_computed_tokens: int) -> None:
        passed = self.passed_blocks(request_id, num_computed_tokens)
        super().let_go(request_id, num_computed_tokens)
        self._num_passed[request_id] = passed.stop

    def take_hit(self, request_id: str, hit: Sequence[KVCacheBlock]) -> None:
        super().take_hit(request_id, hit)
        self._num_passed[request_id] = sum(block is self.pool.null_block for block in hit)

    def pop_table(self, request_id: str) -> list[KVCacheBlock]:
        del self._num_passed[request_id]
        return super().pop_table(request_id)


def make_manager(spec: KVCacheSpec, group_index: int, pool: BlockPool) -> SingleTypeKVCacheManager:
    """The manager for a kind of attention."""
    match spec:
        case FullAttentionSpec():
            return FullAttentionManager(spec, group_index, pool)
        case SlidingWindowSpec():
            return SlidingWindowManager(spec, group_index, pool)
