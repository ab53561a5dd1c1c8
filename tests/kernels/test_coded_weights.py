"""Weights of bf16 whose exponents are coded (csrc/cpu/coded.hpp): the drawn layout, not a bit lost, and the products of
the plain ones, whatever the rows; what cannot be coded stays plain."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo import kernels
from octavo.kernels import PackedWeight

TILE, TABLE, TOGETHER = 768, 16, 4  # bytes, bytes, tiles


pytestmark = pytest.mark.usefixtures("amx_level")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def both(weight: Tensor, gated: bool = False) -> tuple[PackedWeight, PackedWeight]:
    """Plain and coded."""
    plain = kernels.empty_weight((weight.shape[0], weight.shape[1]), weight.dtype, gated)
    kernels.fill_rows(plain, 0, weight)
    coded = kernels.filled(plain)
    assert isinstance(plain, PackedWeight)
    assert isinstance(coded, PackedWeight)
    return plain, coded


def bits(x: Tensor) -> Any:
    return x.contiguous().view(torch.uint16).numpy()


def decoded(data: Any, out_size: int, in_size: int) -> Any:
    """The drawing in coded.hpp, read with numpy."""
    tiles, blocks = in_size // 32, -(-out_size // 16)
    block_bytes = tiles * TILE + -(-tiles // TOGETHER) * TOGETHER * TABLE
    found = np.zeros((blocks * 16, in_size), np.uint16)
    for block, bytes_of_block in enumerate(data.reshape(blocks, block_bytes)):
        for tile in range(tiles):
            start = tile // TOGETHER * TOGETHER * (TILE + TABLE)
            table = bytes_of_block[start + tile % TOGETHER * TABLE :][:TABLE].astype(np.uint16)
            own = bytes_of_block[start + TOGETHER * TABLE + tile % TOGETHER * TILE :][:TILE]
            rest = own[:512].reshape(8, 4, 2, 8)  # pairs of lines, 16 bytes: eight of each line
            nibbles = own[512:].reshape(4, 4, 2, 8)
            codes = np.stack([nibbles & 15, nibbles >> 4], axis=1).reshape(8, 4, 2, 8)
            words = (rest.astype(np.uint16) & 1) << 15 | table[codes] << 7 | rest >> 1
            lines = words.transpose(0, 2, 1, 3).reshape(16, 16, 2)  # pair of inputs, output, input
            found[block * 16 : block * 16 + 16, tile * 32 : tile * 32 + 32] = lines.transpose(1, 0, 2).reshape(16, 32)
    return found[:out_size]


@pytest.mark.parametrize(("out_size", "in_size"), [(16, 32), (1, 64), (40, 160), (33, 288), (300, 96)])
def test_the_drawn_layout_holds_every_bit(out_size: int, in_size: int) -> None:
    weight = random(out_size, in_size, seed=out_size)
    _, coded = both(weight)
    assert coded.coded
    assert np.array_equal(decoded(coded.data.numpy(), out_size, in_size), bits(weight))
    assert not np.array_equal(decoded(coded.data.numpy(), out_size, in_size), bits(weight.flip(1)))  # control
    assert len(coded.data) == kernels.filled_bytes((out_size, in_size), torch.bfloat16)


def test_a_matrix_takes_three_quarters_of_its_bytes() -> None:
    plain, coded = both(random(576, 1536))
    assert len(plain.data) == 2 * 576 * 1536
    assert len(coded.data) / len(plain.data) == pytest.approx(0.765625)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_numbers_come_back_that_have_no_more_than_sixteen_exponents(data: st.DataObject) -> None:
    """Not numbers, infinite ones, those below the normal range, zeros of both signs."""
    exponents = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=16, unique=True))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    shape = 35, 96
    some = draw.choice(np.array([*exponents], np.uint16), shape) << 7
    some |= draw.integers(0, 128, shape, dtype=np.uint16) | draw.integers(0, 2, shape, dtype=np.uint16) << 15
    weight = torch.from_numpy(some).view(torch.bfloat16)
    _, coded = both(weight)
    # The last block has 13 outputs that are none: zeros, and one exponent more.
    assert coded.coded or (len(exponents) == 16 and 0 not in exponents)
    if coded.coded:
        assert np.array_equal(decoded(coded.data.numpy(), *shape), some)


@pytest.mark.parametrize("span", [16, 17])
def test_one_exponent_too_many_leaves_a_matrix_as_it_was(span: int, caplog: pytest.LogCaptureFixture) -> None:
    weight = random(64, 64).abs().clamp(1, 1.9)
    weight[20, 3 : 3 + span] = torch.tensor([2.0**-i for i in range(span)]).bfloat16()
    with caplog.at_level(logging.INFO):
        plain, coded = both(weight)
    x = random(5, 64, seed=1)
    assert torch.equal(kernels.linear(x, coded), kernels.linear(x, plain))
    assert coded.coded == (span == 16)
    assert ("keeps its exponents" in caplog.text) == (span == 17)
    if not coded.coded:
        assert coded.data.numpy().tobytes() == plain.data.numpy().tobytes()


# Outputs: no whole block, none that fills a run of four, two, one; inputs: of one part and of several, and of parts
# whose lines are made anew for each group (4,864).
SHAPES = [(16, 32), (17, 96), (40, 160), (80, 4864), (150, 576), (576, 1536), (1040, 896)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(SHAPES), st.integers(1, 300), st.integers(0, 9))
def test_products_have_the_bits_of_plain_weights(shape: tuple[int, int], rows: int, seed: int) -> None:
    out_size, in_size = shape
    rows = rows if in_size < 4864 else rows % 80 + 1
    plain, coded = both(random(out_size, in_size, seed=seed))
    x, residual, bias = random(rows, in_size, seed=seed + 1), torch.randn(rows, out_size), random(out_size, seed=2)
    assert torch.equal(kernels.linear(x, coded), kernels.linear(x, plain))
    assert torch.equal(kernels.linear(x, coded, bias), kernels.linear(x, plain, bias))
    added = [kernels.linear_add(x, each, None, residual.clone()) for each in (coded, plain)]
    assert torch.equal(*added)
    assert torch.equal(added[0], kernels.logits(x, plain) + residual)  # to each number once
    assert torch.equal(kernels.logits(x, coded, 0.5, 30.0), kernels.logits(x, plain, 0.5, 30.0))
    assert not torch.equal(kernels.logits(x, coded), kernels.logits(x, plain, 0.5))  # control


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 48, 64, 65, 128, 200, 500])
def test_gates_have_the_bits_of_plain_weights(activation: Any, rows: int) -> None:
    plain, coded = both(random(2 * 200, 576, seed=3) * 0.1, gated=True)
    x = random(rows, 576)
    found = kernels.gated_linear(x, coded, None, activation)
    assert torch.equal(found, kernels.gated_linear(x, plain, None, activation))
    # A row is the same alone.
    assert torch.equal(found[-1:], kernels.gated_linear(x[-1:].clone(), coded, None, activation))


def test_an_embedding_reads_the_same_table() -> None:
    weight = random(1000, 288)
    _, coded = both(weight)
    ids = torch.randint(0, 1000, (500,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(kernels.embedding(ids, coded), weight[ids])
    assert torch.equal(kernels.embedding(ids, coded, 3.0, torch.float32), weight[ids].float() * 3)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((64, 33), torch.bfloat16), ((64, 48), torch.bfloat16), ((64, 64), torch.float32)]
)
def test_what_has_no_whole_tiles_of_bfloat16_stays_as_it_is(shape: tuple[int, int], dtype: torch.dtype) -> None:
    packed = kernels.pack_weight(torch.randn(shape).to(dtype))
    assert isinstance(packed, PackedWeight)
    assert not packed.coded
    assert len(packed.data) == kernels.filled_bytes(shape, dtype)


def test_nothing_is_filled_into_a_coded_matrix() -> None:
    _, coded = both(random(16, 32))
    assert kernels.filled(coded) is coded
    with pytest.raises(TypeError, match="whole already"):
        kernels.fill_rows(coded, 0, random(1, 32))
    with pytest.raises(TypeError, match="not kept quantized"):
        kernels.fill_blocks(coded, 0, np.zeros(34, np.uint8))


def test_other_levels_code_nothing_and_refuse_what_was_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    _, coded = both(random(16, 32))
    monkeypatch.setenv("OCTAVO_CPU_ISA", "avx2")
    kernels.select("native")
    _, other = both(random(16, 32))
    assert not other.coded
    with pytest.raises(ValueError, match="coded for another level"):
        kernels.linear(random(1, 32), coded)


def test_threads_may_use_coded_weights_at_once() -> None:
    plain, coded = both(random(256, 576))
    inputs = [random(rows, 576, seed=rows) for rows in (1, 5, 20, 64, 100)]
    expected = [kernels.linear(x, plain) for x in inputs]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda x: kernels.linear(x, coded), inputs * 5))
    assert all(torch.equal(a, b) for a, b in zip(found, expected * 5, strict=True))
