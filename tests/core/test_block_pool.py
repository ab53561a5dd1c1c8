"""BlockPool: who owns what, what is reused next, what can be found again."""

import pytest

from octavo.core.kv_cache import BlockPool, FreeBlockQueue, KVCacheBlock


def ids(blocks: list[KVCacheBlock] | FreeBlockQueue) -> list[int]:
    return [block.block_id for block in blocks]


def cached_pool(num_blocks: int) -> BlockPool:
    """All blocks but the null block hold cached content, named after their ids, and are free, lowest id first."""
    pool = BlockPool(num_blocks, 1)
    blocks = pool.get_new_blocks(num_blocks - 1)
    for block in blocks:
        pool.cache_block(block, b"%d" % block.block_id, 0)
    pool.release(blocks)
    return pool


def test_the_free_list_takes_out_from_the_middle_and_keeps_the_order() -> None:
    blocks = [KVCacheBlock(index) for index in range(5)]
    queue = FreeBlockQueue(blocks)
    queue.remove(blocks[2])
    queue.remove(blocks[4])
    queue.prepend(blocks[4])
    queue.append(blocks[2])
    assert ids(queue) == [4, 0, 1, 3, 2]
    assert [queue.popleft().block_id for _ in range(len(queue))] == [4, 0, 1, 3, 2]
    with pytest.raises(RuntimeError, match="no free KV cache block"):
        queue.popleft()


def test_the_free_list_refuses_what_would_break_it() -> None:
    blocks = [KVCacheBlock(index) for index in range(2)]
    queue = FreeBlockQueue(blocks[:1])
    with pytest.raises(RuntimeError, match="is in the free list already"):
        queue.append(blocks[0])
    with pytest.raises(RuntimeError, match="is not in the free list"):
        queue.remove(blocks[1])
    assert ids(queue) == [0]


def test_the_null_block_is_never_given_out_and_never_free() -> None:
    pool = BlockPool(4, 1)
    assert pool.num_usable_blocks == pool.num_free_blocks == 3
    assert 0 not in ids(pool.get_new_blocks(3))
    pool.touch([pool.null_block])
    pool.release([pool.null_block, pool.null_block])
    pool.cache_block(pool.null_block, b"content", 0)
    assert pool.num_free_blocks == pool.num_cached_blocks == 0


def test_usage_is_the_share_of_usable_blocks_that_are_held() -> None:
    pool = BlockPool(5, 1)
    assert pool.usage == 0.0
    blocks = pool.get_new_blocks(3)
    assert pool.usage == 0.75
    pool.release(blocks)
    assert pool.usage == 0.0


def test_the_least_recently_freed_content_is_evicted_first() -> None:
    pool = cached_pool(5)
    pool.touch([pool.blocks[2]])
    pool.release([pool.blocks[2]])
    assert ids(pool.free_blocks) == [1, 3, 4, 2]
    assert ids(pool.get_new_blocks(2)) == [1, 3]
    assert pool.get_cached_block(b"1", 0) is None
    assert pool.get_cached_block(b"2", 0) is pool.blocks[2]
    assert pool.num_cached_blocks == 2


def test_blocks_without_content_are_reused_before_those_with() -> None:
    pool = cached_pool(5)
    plain = pool.get_new_blocks(2)
    pool.release(plain)
    assert set(ids(pool.free_blocks)[:2]) == set(ids(plain))
    assert ids(pool.free_blocks)[2:] == [3, 4]


def test_freed_content_stays_findable_until_it_is_reused() -> None:
    pool = cached_pool(3)
    block = pool.get_cached_block(b"2", 0)
    assert block is not None
    pool.touch([block])
    assert ids(pool.free_blocks) == [1]
    assert pool.get_new_blocks(1)[0].block_id == 1
    assert pool.get_cached_block(b"2", 0) is block


def test_a_shared_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = cached_pool(3)
    block = pool.blocks[1]
    pool.touch([block])
    pool.touch([block])
    pool.release([block])
    assert block not in list(pool.free_blocks)
    pool.release([block])
    assert block in list(pool.free_blocks)


def test_releasing_what_nobody_holds_is_refused() -> None:
    pool = BlockPool(3, 1)
    with pytest.raises(RuntimeError, match="does not hold it"):
        pool.release([pool.blocks[1]])


def test_the_second_block_of_the_same_content_stays_without_a_hash() -> None:
    pool = BlockPool(4, 1)
    first, second, third = pool.get_new_blocks(3)
    pool.cache_block(first, b"same", 0)
    pool.cache_block(second, b"same", 0)
    pool.cache_block(third, b"other", 0)
    assert pool.get_cached_block(b"same", 0) is first
    assert second.block_hash is None
    pool.release([first, second, third])
    assert ids(pool.free_blocks) == [second.block_id, first.block_id, third.block_id]


def test_groups_do_not_find_each_others_blocks() -> None:
    pool = BlockPool(3, 2)
    block = pool.get_new_blocks(1)[0]
    pool.cache_block(block, b"same", 1)
    assert pool.get_cached_block(b"same", 0) is None
    assert pool.get_cached_block(b"same", 1) is block


def test_reset_forgets_everything_unless_blocks_are_in_use() -> None:
    pool = cached_pool(4)
    pool.touch([pool.blocks[3]])
    assert not pool.reset()
    assert pool.num_cached_blocks == 3
    pool.release([pool.blocks[3]])
    assert pool.reset()
    assert pool.num_cached_blocks == 0
    assert pool.get_cached_block(b"3", 0) is None
    assert pool.num_free_blocks == 3


def test_forgotten_content_is_reused_first_and_taken_from_nobody() -> None:
    pool = cached_pool(5)
    pool.touch([pool.blocks[2]])
    for content in (b"2", b"3", b"unknown"):
        pool.forget(content)
    assert [pool.get_cached_block(b"%d" % index, 0) for index in (2, 3)] == [None, None]
    assert ids(pool.free_blocks) == [3, 1, 4]
    assert pool.blocks[2].ref_count == 1
    assert pool.num_cached_blocks == 2
