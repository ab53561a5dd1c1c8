"""Configurations, requests and steps for the tests of the scheduler, and the checks that hold at any moment."""

from collections.abc import Sequence
from typing import Any

from octavo.config import (
    CacheConfig,
    ModelConfig,
    ObservabilityConfig,
    OctavoConfig,
    ParallelConfig,
    SchedulerConfig,
)
from octavo.core import RequestStatus, Scheduler
from octavo.core.kv_cache import KVCacheManager
from octavo.types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    SlidingWindowSpec,
)

VOCAB_SIZE = 5
EOS = 4


def make_config(
    *,
    max_model_len: int = 64,
    block_size: int = 4,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    policy: str = "fcfs",
    long_prefill_token_threshold: int = 0,
    max_num_queued_reqs: int | None = None,
    max_num_queued_tokens: int | None = None,
    enable_prefix_caching: bool = True,
    fingerprint: str = "weights",
    **more: Any,
) -> OctavoConfig:
    of_cache = ("kv_cache_memory_bytes", "num_gpu_blocks_override", "kv_cache_dtype")
    cache = {name: more.pop(name) for name in of_cache if name in more}
    return OctavoConfig(
        model=ModelConfig(
            model="m", max_model_len=max_model_len, seed=0, served_model_name=["m"], fingerprint=fingerprint, **more
        ),
        cache=CacheConfig(
            block_size=block_size, memory_share=0.5, enable_prefix_caching=enable_prefix_caching, **cache
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            policy=policy,
            long_prefill_token_threshold=long_prefill_token_threshold,
            max_num_queued_reqs=max_num_queued_reqs,
            max_num_queued_tokens=max_num_queued_tokens,
            async_scheduling=False,
        ),
        parallel=ParallelConfig(),
        observability=ObservabilityConfig(),
    )


def full(block_size: int = 4, num_kv_heads: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=2, dtype="float32")


def sliding(window: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_size=2, dtype="float32", sliding_window=window)


def make_kv_config(usable_blocks: int, *specs: KVCacheSpec) -> KVCacheConfig:
    """One group a spec; ``usable_blocks`` without the null block."""
    groups = [KVCacheGroup([f"layer{index}"], spec) for index, spec in enumerate(specs or (full(),))]
    return KVCacheConfig(num_blocks=usable_blocks + 1, tensors=[], groups=groups)


def make_scheduler(usable_blocks: int = 64, *specs: KVCacheSpec, **settings: Any) -> Scheduler:
    return Scheduler(make_config(**settings), make_kv_config(usable_blocks, *specs), "torch")


def make_request(
    request_id: str, prompt: Sequence[int], *, max_tokens: int = 4, arrival_time: float = 0.0, **more: Any
) -> EngineCoreRequest:
    names = ("priority", "cache_salt", "client_index", "choice_index")
    fields = {name: more.pop(name) for name in names if name in more}
    eos = more.pop("eos_token_ids", [])
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, **more)
    return EngineCoreRequest(request_id, list(prompt), params, eos, arrival_time, **fields)


def result_of(output: SchedulerOutput, tokens: dict[str, list[int]], **more: Any) -> ModelRunnerOutput:
    """What a worker would answer; requests that aren't named sample nothing."""
    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(ids, [tokens.get(name, []) for name in ids], [None] * len(ids), **more)


def step(
    scheduler: Scheduler, tokens: dict[str, list[int]] | None = None, **more: Any
) -> tuple[SchedulerOutput, dict[str, EngineCoreOutput]]:
    """A step in which every request that reaches its last token samples a 1, or what ``tokens`` says."""
    output = scheduler.schedule()
    sampling = [r["id"] for r in scheduler.step_trace(output)["requests"] if r["samples"]]
    results = {request_id: [1] for request_id in sampling} | (tokens or {})
    outputs = scheduler.update_from_output(output, result_of(output, results, **more))
    check_scheduler(scheduler)
    return output, {entry.request_id: entry for message in outputs.values() for entry in message.outputs}


def scheduled(output: SchedulerOutput) -> dict[str, int]:
    return output.num_scheduled_tokens


def finish(scheduler: Scheduler) -> dict[str, EngineCoreOutput]:
    last: dict[str, EngineCoreOutput] = {}
    while scheduler.has_unfinished_requests():
        last |= step(scheduler)[1]
    return last


def crowded(
    policy: str, names: str, priorities: dict[str, int] | None = None, blocks: int = 4, **settings: Any
) -> Scheduler:
    """Requests of 4 tokens, a block each, that all need another block in the second step."""
    scheduler = make_scheduler(blocks, policy=policy, **settings)
    for order, name in enumerate(names):
        scheduler.add_request(
            make_request(
                name,
                [order] * 4,
                max_tokens=6,
                arrival_time=float(order),
                priority=(priorities or {}).get(name, 0),
            )
        )
    step(scheduler)
    return scheduler


def cache_state(manager: KVCacheManager) -> Any:
    """Everything that an allocation may change, as values that can be compared."""
    pool = manager.pool
    return (
        [block.block_id for block in pool.free_blocks],
        [(block.ref_count, block.block_hash, block.group_index) for block in pool.blocks],
        pool.num_cached_blocks,
        [
            {name: [block.block_id for block in table] for name, table in group.tables.items()}
            for group in manager.coordinator.managers
        ],
    )


def watch_allocations(manager: KVCacheManager) -> None:
    """From now on an allocation that fails must leave everything as it was."""
    allocate_slots = manager.allocate_slots

    def watched(*args: Any, **more: Any) -> Any:
        before = cache_state(manager)
        blocks = allocate_slots(*args, **more)
        assert blocks is not None or cache_state(manager) == before, "a failed allocation has changed something"
        return blocks

    manager.allocate_slots = watched  # type: ignore[method-assign]


def check_scheduler(scheduler: Scheduler) -> None:
    """Every block is free or has as many owners as it counts; every request is in one place."""
    pool = scheduler.kv_cache_manager.pool
    owners: dict[int, list[tuple[str, int, int]]] = {}
    for group, manager in enumerate(scheduler.kv_cache_manager.coordinator.managers):
        for request_id, table in manager.tables.items():
            assert scheduler.requests[request_id].status is RequestStatus.RUNNING, "only running requests hold blocks"
            for index, block in enumerate(table):
                if block is not pool.null_block:
                    owners.setdefault(block.block_id, []).append((request_id, group, index))
    free = [block.block_id for block in pool.free_blocks]
    assert len(free) == len(set(free)) == pool.num_free_blocks
    assert pool.null_block.block_id not in free
    for block in pool.blocks[1:]:
        held_by = owners.get(block.block_id, [])
        assert block.ref_count == len(held_by), f"{block} is held by {held_by}"
        assert (block.ref_count == 0) == (block.block_id in free), f"{block}: in use and free"
        assert len({group for _, group, _ in held_by}) <= 1, f"{block} is used by two groups"
        if len(held_by) > 1:
            contents = {scheduler.requests[request_id].block_hashes[index] for request_id, _, index in held_by}
            assert len(contents) == 1, f"{block} is shared by requests that want different content there"
            # None: it was found by its content once, and that has turned out to be wrong.
            assert block.block_hash in {None, *contents}, f"{block} has another content than its owners think"
        if block.block_hash is not None:
            assert pool.get_cached_block(block.block_hash, block.group_index) is block
    assert pool.num_cached_blocks == sum(block.block_hash is not None for block in pool.blocks)
    running = {request.request_id for request in scheduler.running}
    assert len(running) == len(scheduler.running)
    assert running == {r.request_id for r in scheduler.requests.values() if r.status is RequestStatus.RUNNING}
    assert len(scheduler.waiting) == scheduler.num_unfinished - len(running)
