"""make_kv_cache_config: groups, tensors, number of blocks, and what happens when the length doesn't fit."""

from typing import Any

import pytest

from octavo.core import make_kv_cache_config
from octavo.errors import ConfigError
from octavo.types import FullAttentionSpec, KVCacheSpec
from tests.core.harness import full, make_config, sliding

PAGE = full().page_size_bytes


def layers(**counts: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    return {f"{name}.{index}": spec for name, (count, spec) in counts.items() for index in range(count)}


def sized(specs: dict[str, KVCacheSpec], available: int, **settings: Any) -> tuple[int, int]:
    """(usable blocks, max_model_len)."""
    config, max_model_len = make_kv_cache_config(specs, available, make_config(**settings))
    page = next(iter(specs.values())).page_size_bytes
    assert sum(tensor.size for tensor in config.tensors) == config.num_blocks * page * len(config.tensors)
    return config.num_blocks - 1, max_model_len


TWO = layers(full=(2, full()))


def test_memory_decides_and_the_null_block_is_paid_for() -> None:
    assert sized(TWO, 50 * 2 * PAGE + 1, max_num_seqs=100) == (49, 64)


def test_never_more_than_all_sequences_need() -> None:
    assert sized(TWO, 10**9, max_num_seqs=3, max_model_len=64) == (3 * 16, 64)
    assert sized(TWO, 10**9, max_num_seqs=3, max_model_len=65) == (3 * 17, 65)


def test_a_window_needs_less_than_the_whole_length() -> None:
    specs = layers(window=(2, sliding(9)))
    settings = {"max_model_len": 1000, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    assert sized(specs, 10**9, **settings) == (2 * (6 + 1), 1000)


def test_a_stated_number_of_blocks_is_taken_as_far_as_memory_goes() -> None:
    assert sized(TWO, 18 * 2 * PAGE, num_gpu_blocks_override=17) == (17, 64)
    assert sized(TWO, 10**9, num_gpu_blocks_override=1000) == (1000, 64)


def test_a_stated_number_of_blocks_beyond_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        sized(TWO, 18 * 2 * PAGE - 1, num_gpu_blocks_override=17)
    for part in ("--num-gpu-blocks-override 17", f"{18 * 2 * PAGE} bytes", str(18 * 2 * PAGE - 1), "at most 16"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="at most 0"):
        sized(TWO, 0, num_gpu_blocks_override=2_000_000_000)


def test_few_stated_blocks_lower_a_derived_length_and_refuse_a_stated_one() -> None:
    assert sized(TWO, 10**9, num_gpu_blocks_override=3) == (3, 12)
    with pytest.raises(ConfigError, match=r"--max-model-len 64 .* --num-gpu-blocks-override 3 hold 3 .* at most 12"):
        sized(TWO, 10**9, num_gpu_blocks_override=3, max_model_len_stated=True)


def test_a_stated_length_that_does_not_fit_is_refused_with_the_one_that_would() -> None:
    with pytest.raises(ConfigError) as caught:
        sized(TWO, 11 * 2 * PAGE, max_model_len=64, max_model_len_stated=True)
    message = str(caught.value)
    for part in ("--max-model-len 64", "at most 40", "--gpu-memory-utilization", "--kv-cache-memory-bytes"):
        assert part in message
    assert "\n" not in message
    assert sized(TWO, 11 * 2 * PAGE, max_model_len=40, max_model_len_stated=True) == (10, 40)
    with pytest.raises(ConfigError, match="at most 40"):
        sized(TWO, 11 * 2 * PAGE, max_model_len=41, max_model_len_stated=True)


def test_a_derived_length_is_lowered_to_what_fits() -> None:
    assert sized(TWO, 11 * 2 * PAGE, max_model_len=64) == (10, 40)


@pytest.mark.parametrize("available", [0, PAGE, 2 * 2 * PAGE - 1])
@pytest.mark.parametrize("stated", [True, False])
def test_no_room_for_anything_is_an_error(available: int, stated: bool) -> None:
    with pytest.raises(ConfigError, match="too few for any sequence"):
        sized(TWO, available, max_model_len_stated=stated)


def test_one_kind_of_layer_is_one_group_with_a_tensor_a_layer() -> None:
    config, _ = make_kv_cache_config(layers(full=(3, full())), 10**6, make_config())
    assert [group.layer_names for group in config.groups] == [["full.0", "full.1", "full.2"]]
    assert [tensor.shared_by for tensor in config.tensors] == [["full.0"], ["full.1"], ["full.2"]]


def test_layers_of_different_kinds_share_tensors_group_by_group() -> None:
    specs = layers(window=(5, sliding(9)), full=(2, full()))
    config, _ = make_kv_cache_config(specs, 10**6, make_config())
    assert [group.layer_names for group in config.groups] == [
        ["window.0", "window.1"],
        ["window.2", "window.3"],
        ["window.4"],
        ["full.0", "full.1"],
    ]
    assert [tensor.shared_by for tensor in config.tensors] == [
        ["window.0", "window.2", "window.4", "full.0"],
        ["window.1", "window.3", "full.1"],
    ]
    assert [group.spec for group in config.groups] == [sliding(9)] * 3 + [full()]


@pytest.mark.parametrize(
    ("windows", "fulls", "max_model_len", "sizes"),
    [
        (13, 13, 8192, [13, 13]),  # Gemma 2 2B
        (22, 4, 32768, [4, 4, 4, 4, 4, 2, 4]),  # Gemma 3 1B: half a group is left open, in a window's
        (29, 5, 131072, [5, 5, 5, 5, 5, 4, 5]),  # Gemma 3 4B
        (14, 13, 1000, [14, 13]),  # an odd number of layers: not three groups, one of them with one layer
        (13, 14, 1000, [13, 14]),
        (14, 13, 10**6, [13, 1, 13]),  # where the full layers' blocks are nearly all, theirs must not be wasted
        (7, 1, 1000, [1] * 8),
        (1, 7, 1000, [1] * 8),
    ],
)
def test_the_longest_sequence_takes_least_memory(
    windows: int, fulls: int, max_model_len: int, sizes: list[int]
) -> None:
    specs = layers(window=(windows, sliding(128)), full=(fulls, full()))
    settings: dict[str, Any] = {"max_model_len": max_model_len, "max_num_batched_tokens": 128}
    config, _ = make_kv_cache_config(specs, 10**12, make_config(**settings))
    assert [len(group.layer_names) for group in config.groups] == sizes
    assert [name for group in config.groups for name in group.layer_names] == list(specs)
    shared = [name for tensor in config.tensors for name in tensor.shared_by]
    assert sorted(shared) == sorted(specs)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (full(8), "different block sizes"),
        (full(4, num_kv_heads=2), "different bytes a block"),
        (FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=2, dtype="bfloat16"), "different bytes a block"),
    ],
)
def test_groups_that_do_not_go_together_are_refused(other: KVCacheSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_kv_cache_config({"a": full(), "b": other}, 10**6, make_config())


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_token_of_8_bits_takes_a_byte_a_channel_and_a_factor_for_key_and_value_of_each_head(dtype: str) -> None:
    shape = {"block_size": 16, "num_kv_heads": 3, "head_size": 64}
    wide, kept = FullAttentionSpec(**shape, dtype="bfloat16"), FullAttentionSpec(**shape, dtype=dtype)
    assert kept.page_size_bytes == 16 * 3 * 2 * (64 + 4)
    memory = 68 * wide.page_size_bytes
    assert sized({"layer": wide}, memory, max_model_len=10_000)[0] == 67
    assert sized({"layer": kept}, memory, max_model_len=10_000)[0] == 127


def test_a_model_without_kv_is_refused() -> None:
    with pytest.raises(ConfigError, match="no attention layer"):
        make_kv_cache_config({}, 10**6, make_config())
