"""KVCacheManager: what is found again, what is allocated, what a window leaves behind; one group and several."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import Request
from octavo.core.kv_cache import KVCacheManager, hash_root_key
from octavo.types import KVCacheSpec, SlidingWindowSpec
from tests.core.harness import cache_state, full, make_kv_config, make_request, sliding

BLOCK = 4
KEY = hash_root_key("weights", "torch", "float32")


def make_manager(usable_blocks: int, *specs: KVCacheSpec, caching: bool = True, budget: int = 64) -> KVCacheManager:
    return KVCacheManager(make_kv_config(usable_blocks, *specs), budget, caching)


def request_of(name: str, tokens: Any, **more: Any) -> Request:
    return Request(make_request(name, list(tokens), max_tokens=100, **more), 1000, BLOCK, KEY, 0)


def compute(manager: KVCacheManager, request: Request, chunk: int = 1000) -> None:
    """Allocates, "computes" and caches all known tokens of a request, from a prefix hit on if it is new."""
    hit = None
    if request.num_computed_tokens == 0:
        hit = manager.get_computed_blocks(request)
        request.num_computed_tokens = hit.num_tokens
    while request.num_computed_tokens < request.num_tokens:
        count = min(chunk, request.num_tokens - request.num_computed_tokens)
        assert manager.allocate_slots(request, count, hit) is not None
        hit = None
        request.num_computed_tokens += count
        manager.cache_blocks(request, request.num_computed_tokens)


def tables(manager: KVCacheManager, name: str) -> tuple[list[int], ...]:
    return manager.block_ids(name)


# lookups -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "found"), [(1, 0), (BLOCK, 0), (BLOCK + 1, BLOCK), (2 * BLOCK, BLOCK), (2 * BLOCK + 1, 2 * BLOCK)]
)
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(length: int, found: int) -> None:
    manager = make_manager(20)
    compute(manager, request_of("a", range(length)))
    assert manager.get_computed_blocks(request_of("b", range(length))).num_tokens == found


def test_a_hit_ends_where_the_tokens_differ() -> None:
    manager = make_manager(20)
    compute(manager, request_of("a", range(12)))
    other = request_of("b", [*range(6), 99, *range(7, 13)])
    assert manager.get_computed_blocks(other).num_tokens == BLOCK


def test_salts_keep_caches_apart() -> None:
    manager = make_manager(20)
    compute(manager, request_of("a", range(9), cache_salt="x"))
    found = [
        manager.get_computed_blocks(request_of(f"b{s}", range(9), cache_salt=s)).num_tokens for s in ("x", "y", None)
    ]
    assert found == [8, 0, 0]


def test_a_lookup_changes_nothing() -> None:
    manager = make_manager(6)
    first = request_of("a", range(9))
    compute(manager, first)
    manager.free(first)
    before = cache_state(manager)
    assert manager.get_computed_blocks(request_of("b", range(9))).num_tokens == 8
    assert cache_state(manager) == before


def test_a_hit_shares_the_blocks_and_takes_them_out_of_the_free_list() -> None:
    manager = make_manager(4)
    first = request_of("a", range(9))
    compute(manager, first)
    shared = tables(manager, "a")[0][:2]
    second = request_of("b", range(9))
    compute(manager, second)
    assert tables(manager, "b")[0][:2] == shared
    assert manager.num_free_blocks == 0
    manager.free(first)
    assert manager.num_free_blocks == 1  # its last block; the shared ones have an owner
    manager.free(second)
    assert manager.num_free_blocks == 4


def test_only_computed_blocks_are_found() -> None:
    manager = make_manager(20)
    first = request_of("a", range(12))
    manager.allocate_slots(first, 12)
    assert manager.get_computed_blocks(request_of("b", range(12))).num_tokens == 0
    manager.cache_blocks(first, 7)
    assert manager.get_computed_blocks(request_of("b", range(12))).num_tokens == BLOCK


def test_the_tail_of_a_freed_request_is_evicted_first() -> None:
    manager = make_manager(4)
    first = request_of("a", range(16))
    compute(manager, first)
    manager.free(first)
    manager.allocate_slots(request_of("x", [50] * 4), 4)
    assert manager.get_computed_blocks(request_of("b", range(17))).num_tokens == 12


def test_the_older_request_is_evicted_before_the_younger() -> None:
    manager = make_manager(4)
    for name, start in (("a", 0), ("b", 100)):
        request = request_of(name, range(start, start + 8))
        compute(manager, request)
        manager.free(request)
    manager.allocate_slots(request_of("x", [50] * 8), 8)
    assert manager.get_computed_blocks(request_of("c", range(9))).num_tokens == 0
    assert manager.get_computed_blocks(request_of("d", range(100, 109))).num_tokens == 8


def test_without_caching_nothing_is_hashed_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo.core.request as request_module

    monkeypatch.setattr(request_module, "hash_block", lambda *_: pytest.fail("hashed"))
    manager = make_manager(20, caching=False)
    request = request_of("a", range(12))
    compute(manager, request)
    assert manager.get_computed_blocks(request_of("b", range(12))).num_tokens == 0
    assert manager.pool.num_cached_blocks == 0
    with pytest.raises(pytest.fail.Exception, match="hashed"):  # the control: with caching, it would have been
        make_manager(20).get_computed_blocks(request)


# plan, then commit ---------------------------------------------------------------------------------------------------


def test_blocks_are_added_only_when_those_at_hand_are_full() -> None:
    manager = make_manager(20)
    request = request_of("a", range(3))
    added = []
    for _ in range(7):
        blocks = manager.allocate_slots(request, 1)
        assert blocks is not None
        added.append([len(group) for group in blocks])
        request.num_computed_tokens += 1
    assert added == [[1], [], [], [], [1], [], []]


@pytest.mark.parametrize("specs", [(full(),), (full(), sliding(6)), (sliding(6),)], ids=["full", "hybrid", "sliding"])
def test_a_failed_allocation_changes_nothing(specs: tuple[KVCacheSpec, ...]) -> None:
    manager = make_manager(6 * len(specs), *specs)
    cached = request_of("cached", range(8))
    compute(manager, cached)
    manager.free(cached)
    running = request_of("running", range(100, 108))
    compute(manager, running)
    late = request_of("late", range(40))
    hit = manager.get_computed_blocks(late)
    before = cache_state(manager)

    assert hit.num_tokens == 8
    assert manager.allocate_slots(late, 32, hit) is None
    assert cache_state(manager) == before
    assert manager.allocate_slots(running, 40) is None
    assert cache_state(manager) == before
    # The control: allocations that succeed do change something.
    assert manager.allocate_slots(late, 2, hit) is not None
    assert cache_state(manager) != before


def test_blocks_of_a_hit_count_as_taken_when_they_were_free() -> None:
    """Two of four free blocks are the hit itself: only two are left for the rest."""
    manager = make_manager(4)
    first = request_of("a", range(8))
    compute(manager, first)
    manager.free(first)
    late = request_of("b", range(8 + 12))
    hit = manager.get_computed_blocks(late)
    assert manager.num_free_blocks == 4
    assert manager.allocate_slots(late, 12, hit) is None
    assert manager.allocate_slots(late, 8, hit) is not None
    assert tables(manager, "b")[0][:2] == [block.block_id for block in hit.blocks[0]]


def test_headroom_must_stay_free() -> None:
    manager = make_manager(4)
    assert manager.allocate_slots(request_of("a", range(8)), 8, headroom=3) is None
    assert manager.allocate_slots(request_of("a", range(8)), 8, headroom=2) is not None
    assert manager.num_free_blocks == 2


# windows -------------------------------------------------------------------------------------------------------------


def test_a_window_leaves_blocks_behind_and_its_table_keeps_its_places() -> None:
    manager = make_manager(20, sliding(6))
    request = request_of("a", range(30))
    compute(manager, request, chunk=1)
    (table,) = tables(manager, "a")
    assert len(table) == 8
    # The 30th token (index 29) sees from index 24 on; the block of 28 was added when 28 saw from 23 on.
    assert [block != 0 for block in table] == [False] * 5 + [True] * 3
    assert manager.num_free_blocks == 17
    manager.free(request)
    assert manager.num_free_blocks == 20


@settings(max_examples=60, deadline=None)
@given(window=st.integers(1, 13), chunk=st.integers(1, 9), length=st.integers(1, 60))
def test_a_window_never_holds_more_than_its_spec_says(window: int, chunk: int, length: int) -> None:
    spec = sliding(window)
    most = spec.max_blocks(length, chunk)
    manager = make_manager(most, spec, budget=chunk)
    request = request_of("a", range(length))
    compute(manager, request, chunk)  # the pool has no block more than that
    assert manager.coordinator.num_blocks_held("a") == sum(block != 0 for block in tables(manager, "a")[0])


def test_a_window_needs_only_the_last_blocks_of_a_hit() -> None:
    manager = make_manager(20, sliding(6))
    first = request_of("a", range(24))
    compute(manager, first)
    cached = manager.pool.get_cached_block(first.block_hashes[0], 0)
    assert cached is not None
    manager.free(first)
    manager.pool.touch([cached])
    # Evict all that is free, but for the blocks of tokens 12 to 19.
    keep = [manager.pool.get_cached_block(first.block_hashes[index], 0) for index in (3, 4)]
    manager.pool.touch([block for block in keep if block is not None])
    others = manager.pool.get_new_blocks(manager.num_free_blocks)
    manager.pool.release(others)

    hit = manager.get_computed_blocks(request_of("b", range(24)))
    assert hit.num_tokens == 20
    assert hit.blocks[0][:3] == [manager.pool.null_block] * 3
    assert hit.blocks[0][3:] == keep


def test_a_window_at_the_beginning_needs_no_more_than_there_is() -> None:
    manager = make_manager(20, sliding(100))
    compute(manager, request_of("a", range(9)))
    assert manager.get_computed_blocks(request_of("b", range(30))).num_tokens == 8


def test_a_hole_in_the_window_shortens_the_hit() -> None:
    """Blocks 0 to 5 are computed, block 4 is lost; a window of two blocks is whole again at the end of block 3."""
    manager = make_manager(20, sliding(9))
    first = request_of("a", range(24))
    compute(manager, first)
    lost = manager.pool.get_cached_block(first.block_hashes[4], 0)
    assert lost is not None
    manager.free(first)
    for block in list(manager.pool.free_blocks):
        if block is not lost:
            manager.pool.touch([block])
    manager.pool.release(manager.pool.get_new_blocks(1))
    assert manager.pool.get_cached_block(first.block_hashes[4], 0) is None
    hit = manager.get_computed_blocks(request_of("b", range(25)))
    assert hit.num_tokens == 16
    assert [block is manager.pool.null_block for block in hit.blocks[0]] == [True, True, False, False]


# several groups ------------------------------------------------------------------------------------------------------


def drop(manager: KVCacheManager, request: Request, group: int, index: int) -> None:
    """Evicts one cached block of a request that was freed."""
    pool = manager.pool
    block = pool.get_cached_block(request.block_hashes[index], group)
    assert block is not None
    pool.free_blocks.remove(block)
    pool.free_blocks.prepend(block)
    pool.release(pool.get_new_blocks(1))
    assert pool.get_cached_block(request.block_hashes[index], group) is None


@pytest.mark.parametrize(
    ("dropped", "found"),
    [
        ([], 24),
        ([(0, 5)], 20),  # the full group has five blocks
        ([(1, 5)], 20),  # the window (two blocks) is whole at the end of block 4
        ([(0, 5), (1, 4)], 16),  # full: five; window: not at five, nor with block 4; whole at four
        ([(1, 4)], 16),  # the window ends at 5, broken; at 4: whole
        ([(0, 4), (1, 3)], 12),  # full: four; the window is broken there; whole at three
        ([(0, 0)], 0),
        ([(1, 0)], 24),  # long behind the window
        ([(1, 5), (1, 3), (1, 1)], 4),
    ],
)
def test_a_hit_must_suit_every_group(dropped: list[tuple[int, int]], found: int) -> None:
    manager = make_manager(40, full(), sliding(9))
    first = request_of("a", range(24))
    compute(manager, first)
    manager.free(first)
    for group, index in dropped:
        drop(manager, first, group, index)
    hit = manager.get_computed_blocks(request_of("b", range(25)))
    assert hit.num_tokens == found
    assert [len(blocks) for blocks in hit.blocks] == [found // BLOCK] * 2


@settings(max_examples=100, deadline=None)
@given(
    windows=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    lost=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 5))),
)
def test_the_longest_hit_is_found_by_trying_all(windows: list[int], lost: set[tuple[int, int]]) -> None:
    specs: list[KVCacheSpec] = [full(), *(sliding(window) for window in windows)]
    manager = make_manager(60, *specs)
    first = request_of("a", range(24))
    compute(manager, first)
    manager.free(first)
    for group, index in lost:
        if group < len(specs):
            drop(manager, first, group, index)

    def suits(group: int, spec: KVCacheSpec, length: int) -> bool:
        seen = length * BLOCK if not isinstance(spec, SlidingWindowSpec) else spec.sliding_window - 1
        # A window of one token sees none before it; a block is asked for all the same.
        needed = range(max(0, (length * BLOCK - max(1, seen)) // BLOCK), length)
        return not any((group, index) in lost for index in needed)

    longest = max(n for n in range(7) if all(suits(group, spec, n) for group, spec in enumerate(specs)))
    assert manager.get_computed_blocks(request_of("b", range(25))).num_tokens == longest * BLOCK


def test_block_ids_travel_per_group() -> None:
    manager = make_manager(40, full(), sliding(5))
    request = request_of("a", range(6))
    blocks = manager.allocate_slots(request, 6)
    assert blocks is not None
    assert [len(group) for group in blocks] == [2, 2]
    assert blocks == manager.block_ids("a")
    assert len({*blocks[0], *blocks[1]}) == 4


def test_the_cache_is_forgotten_only_while_nobody_uses_it() -> None:
    manager = make_manager(10)
    request = request_of("a", range(9))
    compute(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(request_of("b", range(9))).num_tokens == 0
