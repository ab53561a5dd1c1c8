"""What a KV cache of 8 bits keeps, to the last bit: against numpy and the codes' own meaning, and where the native
kernels put it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo import kernels
from octavo.kernels.kv_rows import keep_rows, widen_rows

MakeBatch = Callable[..., Any]
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]
MOST = {torch.int8: 127, torch.float8_e4m3fn: 448}

pytestmark = pytest.mark.usefixtures("level")


def meanings(dtype: torch.dtype) -> NDArray[np.float64]:
    """[256]: the number of each code; NaN where it is none."""
    codes = np.arange(256)
    if dtype == torch.int8:
        return np.where(codes < 128, codes, codes - 256).astype(np.float64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[codes & 127 == 127] = np.nan
    return np.where(codes < 128, size, -size)


def nearest(x: NDArray[np.float32], dtype: torch.dtype) -> NDArray[np.uint8]:
    """The code of the nearest number; of two, the even code."""
    distance = np.abs(meanings(dtype) - x[..., None].astype(np.float64))
    odd = np.arange(256) & 1
    order = np.lexsort((np.broadcast_to(odd, distance.shape), np.nan_to_num(distance, nan=np.inf)), axis=-1)
    found: NDArray[np.uint8] = order[..., 0].astype(np.uint8)
    return np.where(np.signbit(x), found | (found == 0) * 128, found).astype(np.uint8) if dtype != torch.int8 else found


def kept(x: NDArray[np.float32], dtype: torch.dtype) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(codes, factors) of rows whose largest channel is not all too small: each step rounded to float32."""
    most, largest = np.float32(MOST[dtype]), np.abs(x).max(axis=-1, keepdims=True)
    return nearest(x * (most / largest), dtype), (largest / most)[..., 0]


def stored(kv_cache: Tensor, half: int, slot: int, head: int, level: str) -> tuple[list[int], float]:
    """(codes, factor) of a token's key (half 0) or value (1), from where they lie: for the native kernels as KVCache in
    csrc/cpu/kernels.hpp draws it."""
    num_blocks, _, block_size, heads, row = kv_cache.shape
    raw, size = kv_cache.view(torch.uint8).numpy(), row - 4
    block, offset = divmod(slot, block_size)
    if level == "torch":
        found = raw[block, half, offset, head]
        return found[:size].tolist(), float(found[size:].view(np.float32)[0])
    width = block_size & -block_size if block_size % 16 else 16
    tiles = raw.reshape(num_blocks, 2, heads, block_size // width, width * row)
    tile, lane = tiles[block, half, head, offset // width], offset % width
    codes = tile[: width * size].reshape((size, width) if half == 0 else (width, size))
    factors = tile[width * size :].copy().view(np.float32)
    return (codes[:, lane] if half == 0 else codes[lane]).tolist(), float(factors[lane])


def assert_kept(kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor, level: str) -> None:
    for half, x in enumerate((key, value)):
        codes, factors = kept(x.float().numpy(), kv_cache.dtype)
        for row, slot in enumerate(slots.tolist()):
            for head in range(x.shape[1]):
                found = stored(kv_cache, half, slot, head, level)
                assert found == (codes[row, head].tolist(), float(factors[row, head]))


def rows(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """[30, 2, size] of very different sizes, in one row and from row to row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 2, size, generator=generator)
    spread = torch.randn(30, 2, size, generator=generator) * torch.linspace(0, 5, 30)[:, None, None]
    return (x * spread.exp() * torch.logspace(-20, 20, 30)[:, None, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("as_kept", EIGHT_BITS)
@pytest.mark.parametrize(("size", "block_size"), [(64, 16), (80, 12), (5, 3), (18, 32)])
def test_each_channel_is_kept_as_the_nearest_code_and_the_factor_is_its_row_s_own(
    level: str, dtype: torch.dtype, as_kept: torch.dtype, size: int, block_size: int
) -> None:
    key, value = rows(size, dtype, 0), rows(size, dtype, 1)
    slots = torch.arange(30) * 7 % 31
    cache = torch.full((31 // block_size + 1, 2, block_size, 2, size + 4), 0xFF, dtype=torch.uint8).view(as_kept)
    kernels.reshape_and_cache(key, value, cache, slots)
    assert_kept(cache, slots, key, value, level)
    with pytest.raises(AssertionError):  # the control: a head is not the other
        assert_kept(cache, slots, key.flip(1), value, level)


@pytest.mark.parametrize("as_kept", EIGHT_BITS)
def test_every_code_and_every_middle_between_two_comes_out(level: str, as_kept: torch.dtype) -> None:
    """With the largest code in the row and a factor of 1, a number is kept as it is; a middle goes to the even code."""
    numbers = np.unique(meanings(as_kept)[~np.isnan(meanings(as_kept))])
    numbers = numbers[np.abs(numbers) <= MOST[as_kept]]
    x = torch.from_numpy(np.concatenate([numbers, (numbers[:-1] + numbers[1:]) / 2])).float()[None, None]
    cache = torch.zeros(1, 2, 16, 1, x.shape[-1] + 4, dtype=torch.uint8).view(as_kept)
    kernels.reshape_and_cache(x, x, cache, torch.tensor([3]))
    for half in (0, 1):
        codes, factor = stored(cache, half, 3, 0, level)
        assert factor == 1.0
        assert meanings(as_kept)[codes][: len(numbers)].tolist() == numbers.tolist()
        assert codes == nearest(x.numpy(), as_kept)[0, 0].tolist()


@pytest.mark.parametrize("as_kept", EIGHT_BITS)
@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 1e-31])
def test_rows_that_are_next_to_nothing_are_zero(level: str, as_kept: torch.dtype, largest: float) -> None:
    x = torch.tensor([largest, -largest, 0.0, largest / 2])[None, None]
    cache = torch.full((1, 2, 16, 1, 8), 0xFF, dtype=torch.uint8).view(as_kept)
    kernels.reshape_and_cache(x, x, cache, torch.tensor([5]))
    for half in (0, 1):
        codes, factor = stored(cache, half, 5, 0, level)
        assert not meanings(as_kept)[codes].any()
        assert factor == np.float32(largest) / np.float32(MOST[as_kept])


@pytest.mark.parametrize("as_kept", EIGHT_BITS)
def test_rows_read_as_code_times_factor_within_half_a_step(as_kept: torch.dtype) -> None:
    x = rows(64, torch.float32, 2)
    found = widen_rows(keep_rows(x, as_kept))
    codes, factors = kept(x.numpy(), as_kept)
    assert found.numpy().tolist() == (meanings(as_kept)[codes].astype(np.float32) * factors[..., None]).tolist()
    largest = x.abs().amax(dim=-1, keepdim=True)
    half_a_step = largest / 254 if as_kept == torch.int8 else torch.maximum(x.abs() / 16, largest / 448 * 2**-10)
    assert ((found - x).abs() <= half_a_step * 1.0001).all()


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_attention_reads_each_code_as_its_number(make_batch: MakeBatch, dtype: torch.dtype) -> None:
    """All positions have the same value, one channel for each code; a prompt, and a request of one row."""
    numbers = np.nan_to_num(meanings(dtype)).clip(-MOST[dtype], MOST[dtype])
    batch = make_batch([(20, 20), (1, 1)], num_kv_heads=1, shared=1, head_size=256, dtype=torch.bfloat16, kept=dtype)
    rows = torch.from_numpy(numbers).bfloat16().expand(21, 1, 256)
    kernels.reshape_and_cache(rows.contiguous(), rows.contiguous(), batch.kv_cache, batch.metadata.slot_mapping)
    got = kernels.paged_attention(batch.query, batch.kv_cache, batch.metadata, 0.0625).double().numpy()
    np.testing.assert_array_equal(got[20, 0], numbers)
    np.testing.assert_allclose(got[:20, 0], np.broadcast_to(numbers, (20, 256)), rtol=2**-7)
    with pytest.raises(AssertionError):  # the control: a code's neighbour is told from it
        np.testing.assert_allclose(got[:20, 0], np.roll(got[:20, 0], 1, axis=1), rtol=2**-7)
