"""Replay of many rows: threads go through several calls by themselves, each for rows of its own, and nothing is
different from all calls one after the other, whatever memory they have in common."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from octavo import kernels

if find_spec("octavo._native") is None:
    pytest.skip("built without native kernels", allow_module_level=True)

from octavo import _native

MAX_ROWS = 2500
WIDTH = 96
F32, BF16 = 0, 1


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda threads: f"{threads} threads", autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    kernels.select("native")
    _native.choose(kernels.kernel_set().removeprefix("native-"), request.param)
    yield request.param
    kernels.select("torch")


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layers(x: Tensor, weights: list[kernels.Weight], norm: Tensor) -> Tensor:
    """A residual in float32, and rows of two widths and two types."""
    residual = kernels.rms_norm(x, norm, 1e-5, torch.float32)
    for wide, narrow in zip(weights[::2], weights[1::2], strict=True):
        normed = kernels.rms_norm(residual, norm, 1e-5, x.dtype)
        residual = kernels.linear_add(kernels.linear(normed, wide), narrow, None, residual)
    return residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 127, 255, 256, 257, 300, 511, 1000, 1025, 2048, MAX_ROWS])
def test_many_rows_are_replayed_with_the_bits_of_the_calls_themselves(dtype: torch.dtype, rows: int) -> None:
    shapes = [(3 * WIDTH, WIDTH), (WIDTH, 3 * WIDTH), (2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)]
    weights = [kernels.pack_weight(random(*shape, seed=seed).to(dtype) / 10) for seed, shape in enumerate(shapes)]
    norm, x = random(WIDTH, seed=5).to(dtype), random(MAX_ROWS, WIDTH, seed=6).to(dtype)
    recorded = kernels.record_forward(lambda rows: layers(x[:rows], weights, norm), (x,), MAX_ROWS)
    expected = layers(x[:rows].clone(), weights, norm)
    assert torch.equal(recorded.run(rows, 1), expected)


def cast(x: Tensor, out: Tensor) -> None:
    types = {torch.float32: F32, torch.bfloat16: BF16}
    rows, size = x.shape
    _native.cast(types[x.dtype], x.data_ptr(), x.stride(0), types[out.dtype], out.data_ptr(), rows, size)


def test_memory_that_is_another_rows_in_a_later_call_is_not_written_too_early() -> None:
    """The second result is read before the third call writes wider rows to where the first one's rows are."""
    memory = torch.zeros(MAX_ROWS * 2 * WIDTH, dtype=torch.bfloat16)
    narrow, wide = memory[: MAX_ROWS * WIDTH].view(MAX_ROWS, WIDTH), memory.view(MAX_ROWS, 2 * WIDTH)
    x, other = random(MAX_ROWS, WIDTH, seed=1), random(MAX_ROWS, 2 * WIDTH, seed=2)
    found = torch.zeros(MAX_ROWS, WIDTH)
    recording = _native.Recording(MAX_ROWS, 1)
    recording.begin()
    try:
        cast(x, narrow)
        cast(narrow, found)
        cast(other, wide)
    finally:
        recording.end()
    for rows in (256, 1000, MAX_ROWS):
        for _ in range(5):
            found.zero_()
            recording.run(rows, 1)
            assert torch.equal(found[:rows], x[:rows].bfloat16().float())
            assert torch.equal(wide[:rows], other[:rows].bfloat16())


def test_what_one_thread_finds_wrong_is_raised() -> None:
    ids = torch.zeros(MAX_ROWS, dtype=torch.int64)
    table, norm = kernels.pack_weight(random(64, WIDTH, seed=1)), torch.ones(WIDTH)

    def forward(rows: int) -> Tensor:
        return kernels.rms_norm(kernels.embedding(ids[:rows], table), norm, 1e-5)

    recorded = kernels.record_forward(forward, (ids,), MAX_ROWS)
    ids[1500] = 64
    with pytest.raises(IndexError, match="token ids must be below 64"):
        recorded.run(2048, 1)
    ids[1500] = 63
    assert torch.equal(recorded.run(2048, 1), forward(2048))
