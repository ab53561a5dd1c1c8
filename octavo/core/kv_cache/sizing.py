"""How the layers' KV caches become groups, tensors and a number of blocks; and what length that leaves room for."""

from collections.abc import Sequence

from octavo.config import OctavoConfig
from octavo.errors import ConfigError, UsageError
from octavo.types import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVCacheTensor

__all__ = ["make_kv_cache_config"]

# One token of prompt and one of output.
_SHORTEST_LEN = 2
_MORE_MEMORY = (
    "raise --gpu-memory-utilization, --kv-cache-memory-bytes or --num-gpu-blocks-override, whichever is in use"
)


def make_kv_cache_config(
    specs: dict[str, KVCacheSpec], available_bytes: int, config: OctavoConfig
) -> tuple[KVCacheConfig, int]:
    """Sizes the cache: as large as memory allows, never larger than ``max_num_seqs`` sequences of ``max_model_len``
    tokens need.

    Args:
        specs: layer name → what it keeps, in the model's order.
        available_bytes: what the cache may take, the null block included; ``--num-gpu-blocks-override`` may take less.

    Returns:
        The cache, and max_model_len: the config's, or a smaller one if that was derived and is too long.

    Raises:
        ConfigError: the stated max_model_len or number of blocks (or anything at all) does not fit, or the groups don't
            go together. UsageError where it is stated how much memory the cache takes: that will not change.
    """
    max_model_len = config.model.max_model_len
    budget = config.scheduler.max_num_batched_tokens
    groups = _make_groups(specs, max_model_len, budget)
    group_specs = [group.spec for group in groups]
    num_tensors = max(len(group.layer_names) for group in groups)
    page_bytes = group_specs[0].page_size_bytes
    block_bytes = page_bytes * num_tensors

    override = config.cache.num_gpu_blocks_override
    if override is not None:
        _check_blocks_fit(override, block_bytes, available_bytes)
        usable, source = override, f"--num-gpu-blocks-override {override}"
    else:
        # The null block takes memory too.
        usable = max(0, available_bytes // block_bytes - 1)
        usable = min(usable, config.scheduler.max_num_seqs * _max_blocks(group_specs, max_model_len, budget))
        stated = config.cache.kv_cache_memory_bytes
        memory = _megabytes(available_bytes)
        source = f"{memory} of KV cache memory" if stated is None else f"--kv-cache-memory-bytes {stated} ({memory})"

    needed = _max_blocks(group_specs, max_model_len, budget)
    if needed > usable:
        fits = _longest_that_fits(group_specs, usable, max_model_len, budget)
        kind = ConfigError if config.cache.kv_cache_memory_bytes is None else UsageError
        room = f"{source} hold {usable} blocks of {group_specs[0].block_size} tokens"
        if fits < _SHORTEST_LEN:
            raise kind(f"{room}, too few for any sequence of {_SHORTEST_LEN} tokens; {_MORE_MEMORY}")
        if config.model.max_model_len_stated:
            raise kind(
                f"--max-model-len {max_model_len} needs {needed} KV cache blocks "
                f"({_megabytes(needed * block_bytes)}), but {room}; "
                f"lower --max-model-len to at most {fits}, or {_MORE_MEMORY}"
            )
        max_model_len = fits
    num_blocks = usable + 1
    tensors = [
        KVCacheTensor(
            size=num_blocks * page_bytes,
            shared_by=[group.layer_names[index] for group in groups if index < len(group.layer_names)],
        )
        for index in range(num_tensors)
    ]
    return KVCacheConfig(num_blocks=num_blocks, tensors=tensors, groups=groups), max_model_len


def _check_blocks_fit(num_blocks: int, block_bytes: int, available_bytes: int) -> None:
    most = available_bytes // block_bytes - 1
    if num_blocks > most:
        raise ConfigError(
            f"--num-gpu-blocks-override {num_blocks} takes {(num_blocks + 1) * block_bytes} bytes with the null block, "
            f"and the KV cache may take {available_bytes}; lower it to at most {max(0, most)}"
        )


def _make_groups(specs: dict[str, KVCacheSpec], max_model_len: int, budget: int) -> list[KVCacheGroup]:
    """Layers with equal specs, cut into groups of one size, so that a tensor can serve one layer of each group."""
    layers: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        layers.setdefault(spec, []).append(name)
    if not layers:
        raise ConfigError("the model has no attention layer that keeps a KV cache; octavo serves models that have")
    _check_equal("block sizes", {spec.block_size for spec in layers})
    _check_equal("bytes a block", {spec.page_size_bytes for spec in layers})
    size = _group_size({spec: len(names) for spec, names in layers.items()}, max_model_len, budget)
    return [
        KVCacheGroup(names[start : start + size], spec)
        for spec, names in layers.items()
        for start in range(0, len(names), size)
    ]


def _group_size(counts: dict[KVCacheSpec, int], max_model_len: int, budget: int) -> int:
    """Layers of a group. A group with fewer wastes part of each of its blocks; many small groups are slow, so a group
    has at least as many as the rarest spec. Of those sizes, the one at which the longest sequence takes least memory:
    4 full layers beside 22 of a window make groups of 4, but 13 beside 14 make two groups, of 14."""

    def layers_paid_for(size: int) -> int:
        blocks = sum(-(-count // size) * spec.max_blocks(max_model_len, budget) for spec, count in counts.items())
        return blocks * size

    sizes = range(min(counts.values()), max(counts.values()) + 1)
    return min(sizes, key=lambda size: (layers_paid_for(size), -size))


def _check_equal(what: str, found: set[int]) -> None:
    if len(found) > 1:
        raise ConfigError(
            f"the model's layers keep KV caches with different {what} ({', '.join(map(str, sorted(found)))}); "
            "layers that share a cache must have the same"
        )


def _max_blocks(specs: Sequence[KVCacheSpec], num_tokens: int, max_num_batched_tokens: int) -> int:
    """Blocks that one sequence of ``num_tokens`` holds at most."""
    return sum(spec.max_blocks(num_tokens, max_num_batched_tokens) for spec in specs)


def _longest_that_fits(specs: Sequence[KVCacheSpec], usable: int, longest: int, max_num_batched_tokens: int) -> int:
    """Most tokens, below ``longest``, of a sequence that ``usable`` blocks can hold."""
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        if _max_blocks(specs, middle, max_num_batched_tokens) <= usable:
            low = middle
        else:
            high = middle
    return low


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
