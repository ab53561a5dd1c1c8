"""BlockPool: who owns which block, which are free, and which content can be found again.

A block is free when nobody holds it. Free blocks keep their content and their hash until they are reused: those
without a hash first, then the least recently freed. Knows nothing of requests, groups' layouts or tensors.
"""

from collections.abc import Iterable, Iterator

__all__ = ["BlockPool", "FreeBlockQueue", "KVCacheBlock"]


class KVCacheBlock:
    """One block of the pool.

    Attributes:
        ref_count: how many block tables hold it; 0: it is in the free list.
        block_hash: names its content, where it can be found by that; ``group_index`` is the KV cache group it is
            the content of.
        prev_free, next_free: neighbours in the free list.
    """

    __slots__ = ("block_hash", "block_id", "group_index", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.group_index = 0
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_count={self.ref_count}, cached={self.block_hash is not None})"


class FreeBlockQueue:
    """Doubly linked list through the blocks themselves: every operation is O(1), also from the middle.

    Invariant: a block is linked if and only if both its neighbours are set; two sentinels stand at the ends.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """From the next block to be reused to the last."""
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def append(self, block: KVCacheBlock) -> None:
        """To the end: reused last."""
        last = self._tail.prev_free
        assert last is not None
        self._link(last, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """To the front: reused next."""
        first = self._head.next_free
        assert first is not None
        self._link(self._head, block, first)

    def popleft(self) -> KVCacheBlock:
        """Takes the block that is to be reused next."""
        block = self._head.next_free
        if block is None or block is self._tail:
            raise RuntimeError("no free KV cache block is left")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Takes a block out, wherever it is."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise RuntimeError(f"KV cache block {block.block_id} is not in the free list")
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._length -= 1

    def _link(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        if block.next_free is not None:
            raise RuntimeError(f"KV cache block {block.block_id} is in the free list already")
        before.next_free, block.prev_free = block, before
        block.next_free, after.prev_free = after, block
        self._length += 1


class BlockPool:
    """Args:

    num_blocks: all blocks; block 0 is the null block, which is never owned, written or free.
    num_groups: KV cache groups; the content of a block belongs to one of them.
    """

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.num_usable_blocks = num_blocks - 1  # all but the null block
        self.free_blocks = FreeBlockQueue(self.blocks[1:])
        self._cached: list[dict[bytes, KVCacheBlock]] = [{} for _ in range(num_groups)]

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a lookup can find, in use or free."""
        return sum(map(len, self._cached))

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody holds, 0 to 1."""
        return 1.0 - len(self.free_blocks) / max(1, self.num_usable_blocks)

    def get_cached_block(self, block_hash: bytes, group_index: int) -> KVCacheBlock | None:
        """The block of that group with that content; changes nothing."""
        return self._cached[group_index].get(block_hash)

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Takes free blocks for one owner; what was cached in them is forgotten."""
        blocks = []
        for _ in range(count):
            block = self.free_blocks.popleft()
            if block.block_hash is not None:
                self._forget(block)
            block.ref_count = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One owner more for each; a block that was free is free no longer."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count == 0:
                self.free_blocks.remove(block)
            block.ref_count += 1

    def release(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One owner less for each. Blocks that become free are reused in the given order, after all blocks that
        are free already; those without a hash before everything else."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count <= 0:
                raise RuntimeError(f"KV cache block {block.block_id} was released by someone who does not hold it")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self.free_blocks.prepend(block)
                else:
                    self.free_blocks.append(block)

    def cache_block(self, block: KVCacheBlock, block_hash: bytes, group_index: int) -> None:
        """Makes a full block findable. If another block has the same content already, this one stays without a hash."""
        cached = self._cached[group_index]
        if block is self.null_block or block.block_hash is not None or block_hash in cached:
            return
        block.block_hash = block_hash
        block.group_index = group_index
        cached[block_hash] = block

    def forget(self, block_hash: bytes) -> None:
        """Content of that name is found no longer; who holds it goes on holding it."""
        for cached in self._cached:
            block = cached.get(block_hash)
            if block is None:
                continue
            self._forget(block)
            if block.ref_count == 0:
                self.free_blocks.remove(block)
                self.free_blocks.prepend(block)

    def reset(self) -> bool:
        """Forgets all cached content; False, and nothing is changed, while blocks are in use."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for cached in self._cached:
            for block in list(cached.values()):
                self._forget(block)
        return True

    def _forget(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None
        del self._cached[block.group_index][block.block_hash]
        block.block_hash = None
