"""Paged attention against a plain loop over rows and heads, with every unwritten place of the cache full of NaN."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo import kernels

MakeBatch = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("level")
few = settings(max_examples=40, deadline=None, derandomize=True)
DECODE, CHUNK, PROMPT = (1, 40), (5, 33), (21, 21)


EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]


def assume_native_can(dtype: torch.dtype, head_size: int) -> None:
    """Native kernels have no float16, and take channels of bfloat16 in pairs."""
    native = kernels.chosen_provider() == "native"
    assume(not native or dtype == torch.float32 or (dtype == torch.bfloat16 and head_size % 2 == 0))


def reference(
    batch: Any, scale: float, window: int | None, softcap: float | None = None, sinks: torch.Tensor | None = None
) -> np.ndarray:
    """Row by row, head by head, in double precision; looks at no block table."""
    query = batch.query.double().numpy()
    num_heads = query.shape[1]
    output = np.zeros_like(query)
    starts, ends = batch.metadata.query_start_loc.tolist(), batch.metadata.seq_lens.tolist()
    for request, end in enumerate(ends):
        keys, values = batch.keys[request].double().numpy(), batch.values[request].double().numpy()
        shared = num_heads // keys.shape[1]
        for row in range(starts[request], starts[request + 1]):
            position = end - (starts[request + 1] - row)
            oldest = 0 if window is None else max(0, position + 1 - window)
            for head in range(num_heads):
                scores = keys[oldest : position + 1, head // shared] @ query[row, head] * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                sink = -np.inf if sinks is None else float(sinks[head])
                largest = max(scores.max(), sink)
                weights = np.exp(scores - largest)
                output[row, head] = (
                    weights / (weights.sum() + np.exp(sink - largest)) @ values[oldest : position + 1, head // shared]
                )
    return output


def assert_attends(batch: Any, window: int | None, scale: float = 0.25, **more: Any) -> None:
    got = kernels.paged_attention(batch.query, batch.kv_cache, batch.metadata, scale, window, **more)
    assert got.dtype == batch.query.dtype
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[got.dtype]
    expected = reference(batch, scale, window, **more)
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=tolerance, atol=tolerance)


def drawn_sinks(batch: Any, spread: float = 3.0) -> torch.Tensor:
    """One for each head, about as large as the scores."""
    return torch.randn(batch.query.shape[1], generator=torch.Generator().manual_seed(9)) * spread


lengths = st.integers(0, 60).flatmap(lambda before: st.integers(1, 40).map(lambda new: (new, before + new)))
batches = st.lists(st.one_of(lengths, st.integers(1, 90).map(lambda end: (1, end))), min_size=1, max_size=6)


@few
@given(
    requests=batches,
    num_kv_heads=st.integers(1, 3),
    shared=st.integers(1, 4),
    head_size=st.sampled_from([2, 5, 16, 24, 64, 80, 256]),
    block_size=st.sampled_from([1, 3, 16, 32]),
    window=st.one_of(st.none(), st.integers(1, 70)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_mix_of_rows(
    make_batch: MakeBatch, requests: list[tuple[int, int]], window: int | None, **shape: Any
) -> None:
    assume_native_can(shape["dtype"], shape["head_size"])
    assert_attends(make_batch(requests, window=window, **shape), window, scale=shape["head_size"] ** -0.5)


@few
@given(
    requests=batches,
    num_kv_heads=st.integers(1, 3),
    shared=st.integers(1, 5),
    head_size=st.sampled_from([5, 18, 64, 80, 128, 256, 300]),
    block_size=st.sampled_from([1, 3, 12, 16, 24, 32]),
    window=st.one_of(st.none(), st.integers(1, 70)),
    softcap=st.sampled_from([None, 3.0]),
    with_sinks=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kept=st.sampled_from(EIGHT_BITS),
)
def test_any_mix_of_rows_over_a_cache_of_8_bits(
    make_batch: MakeBatch,
    requests: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    **shape: Any,
) -> None:
    batch = make_batch(requests, window=window, **shape)
    sinks = drawn_sinks(batch) if with_sinks else None
    assert_attends(batch, window, scale=shape["head_size"] ** -0.5, softcap=softcap, sinks=sinks)


@few
@given(
    requests=batches,
    num_kv_heads=st.integers(1, 3),
    shared=st.integers(1, 4),
    head_size=st.sampled_from([5, 16, 24]),
    block_size=st.sampled_from([3, 16]),
    window=st.one_of(st.none(), st.integers(1, 70)),
    softcap=st.sampled_from([None, 0.7, 3.0, 50.0]),
    with_sinks=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_soft_caps_and_sinks(
    make_batch: MakeBatch,
    requests: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    **shape: Any,
) -> None:
    assume_native_can(shape["dtype"], shape["head_size"])
    batch = make_batch(requests, window=window, **shape)
    assert_attends(batch, window, softcap=softcap, sinks=drawn_sinks(batch) if with_sinks else None)


@pytest.mark.parametrize("window", [None, 301])
def test_soft_caps_and_sinks_across_the_tiles(make_batch: MakeBatch, window: int | None) -> None:
    batch = make_batch([(530, 700), (1, 650)], num_kv_heads=1, shared=2, head_size=8, window=window)
    assert_attends(batch, window, softcap=1.5, sinks=drawn_sinks(batch))


def test_a_sink_far_below_the_scores_takes_nothing_and_one_far_above_takes_all(make_batch: MakeBatch) -> None:
    batch = make_batch([DECODE, CHUNK, PROMPT])
    arguments = (batch.query, batch.kv_cache, batch.metadata, 0.25)
    sinks = torch.full((batch.query.shape[1],), 1e4)
    assert torch.equal(kernels.paged_attention(*arguments, sinks=-sinks), kernels.paged_attention(*arguments))
    assert not kernels.paged_attention(*arguments, sinks=sinks).any()


@pytest.mark.parametrize("window", [None, 1, 7, 16, 301, 10_000])
@pytest.mark.parametrize("kept", [None, *EIGHT_BITS])
def test_long_prompts_cross_the_tiles(make_batch: MakeBatch, window: int | None, kept: torch.dtype | None) -> None:
    shape = {"num_kv_heads": 1, "shared": 2, "head_size": 8, "kept": kept}
    batch = make_batch([(530, 700), (1, 650), (257, 257)], window=window, **shape)
    assert_attends(batch, window)


def test_decode_rows_of_very_different_lengths(make_batch: MakeBatch) -> None:
    requests = [(1, end) for end in (1, 2, 700, 17, 300, 65, 66, 130, 131, 500)]
    batch = make_batch(requests, head_size=8)
    assert_attends(batch, None)
    groups = batch.metadata.row_groups(16, None)
    computed = sum(group.slots.numel() for group in groups)
    assert 1 < len(groups) < len(requests)
    assert computed <= 2 * sum(end for _, end in requests) + 64 * len(requests)


def test_large_scores_do_not_overflow(make_batch: MakeBatch) -> None:
    batch = make_batch([DECODE, CHUNK, PROMPT])
    batch.query *= 1e4
    got = kernels.paged_attention(batch.query, batch.kv_cache, batch.metadata, 1.0, None)
    assert got.isfinite().all()


def test_control_a_key_that_was_not_written_shows(make_batch: MakeBatch) -> None:
    batch = make_batch([DECODE, CHUNK])
    batch.kv_cache.view(-1, 2, 16, *batch.kv_cache.shape[3:])[batch.metadata.block_table[0, 0], 0, 3] = float("nan")
    got = kernels.paged_attention(batch.query, batch.kv_cache, batch.metadata, 0.25, None)
    assert got[0].isnan().any()
    assert got[1:].isfinite().all()


@pytest.mark.parametrize("kept", EIGHT_BITS)
def test_control_the_tolerance_tells_what_came_from_what_was_kept_and_a_factor_from_another_heads(
    make_batch: MakeBatch, kept: torch.dtype
) -> None:
    batch, wide = make_batch([DECODE, CHUNK, PROMPT], kept=kept), make_batch([DECODE, CHUNK, PROMPT])
    assert_attends(batch, None)
    factors = [each.abs().amax(dim=-1, keepdim=True) for each in batch.values]
    swapped = [each / factor * factor.flip(1) for each, factor in zip(batch.values, factors, strict=True)]
    for wrong in ({"keys": wide.keys}, {"values": wide.values}, {"values": swapped}):
        with pytest.raises(AssertionError):
            assert_attends(replace(batch, **wrong), None)


@pytest.mark.parametrize("wrong", [6, 8])
def test_control_a_window_off_by_one_fails(make_batch: MakeBatch, wrong: int) -> None:
    batch = make_batch([DECODE, CHUNK, PROMPT], window=10)
    assert_attends(batch, 7)
    got = kernels.paged_attention(batch.query, batch.kv_cache, batch.metadata, 0.25, wrong)
    assert np.abs(got.double().numpy() - reference(batch, 0.25, 7)).max() > 1e-2


def test_control_the_tolerance_tells_a_missing_cap_and_another_heads_sink(make_batch: MakeBatch) -> None:
    batch = make_batch([DECODE, CHUNK, PROMPT])
    sinks = drawn_sinks(batch)
    for wrong in ({"sinks": sinks}, {"softcap": 1.5}, {"softcap": 1.5, "sinks": sinks.roll(1)}):
        got = kernels.paged_attention(batch.query, batch.kv_cache, batch.metadata, 0.25, None, **wrong)
        assert np.abs(got.double().numpy() - reference(batch, 0.25, None, 1.5, sinks)).max() > 1e-2
