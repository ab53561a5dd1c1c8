"""Quantized weights that become bf16 while they are multiplied (csrc/cpu/quantized_lines.hpp): the products of the
plain bf16 kernels with the weights that the drawing says, bit for bit, for every type, shape and number of rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels import PackedWeight
from tests.kernels.quantized_blocks import TYPES, Weight, block_values, draw

# (outputs, blocks of inputs, rows): outputs that sixteen does not divide, an odd number of packed blocks, every number
# of tiles of rows, and rows for which lines are kept.
SHAPES = [(16, 1, 1), (40, 3, 2), (33, 2, 13), (64, 5, 17), (640, 2, 40), (96, 1, 64), (96, 3, 70), (72, 2, 500)]
COUNTS = [1, 2, 15, 16, 17, 32, 33, 48, 49, 64, 65, 96, 129, 400]


def widened(type_name: str, weight: Weight, gated: bool = False) -> PackedWeight:
    shape = (weight.q.shape[0], weight.q.shape[1])
    found = kernels.widened_in_products(kernels.pack_blocks(type_name, weight.data, shape, torch.bfloat16, gated))
    assert isinstance(found, PackedWeight)
    return found


def drawn(type_name: str, weight: Weight, half_scale: float) -> Tensor:
    """[out, in] of bf16: scale and offset in half precision, the weight rounded to it once, and then to 8 bits, halves
    away from zero; what is small as a half counts as the drawing says. Numbers of four bits count less eight, and eight
    scales more in their offset; the last four of eight inputs, of five and six, a scale that was rounded 256 times
    smaller, which changes only what is as small as that."""
    factor = np.float32(half_scale)

    def wide(of_each_half: np.ndarray) -> np.ndarray:
        return np.repeat(of_each_half, 16, axis=1).astype(np.float64)

    scale = own = wide((weight.scale * factor).astype(np.float16))
    if type_name[:2] in ("Q5", "Q6"):
        last_four = np.arange(scale.shape[1]) % 8 >= 4
        scale = np.where(last_four, (own / 256).astype(np.float16).astype(np.float64) * 256, own)
    if weight.offset.any():
        offset = wide((weight.offset * factor).astype(np.float16))
        kept_less = 8 if type_name in ("Q4_1", "Q4_K") else 0
        exact = scale * (weight.q - kept_less) + (kept_less * scale - offset).astype(np.float16).astype(np.float64)
    elif type_name in ("Q5_0", "Q6_K", "Q8_0"):  # a zero has no sign
        exact = scale * weight.q - own * wide(weight.centre)
    else:
        exact = scale * (weight.q - wide(weight.centre))
    halves = exact.astype(np.float16).view(np.uint16).astype(np.uint32) + 4
    bits = (halves & 0x8000 | (halves & 0x7FFF) >> 3 | 0x3000) << 16
    values = torch.from_numpy(bits.astype(np.uint32).view(np.float32) * np.float32(65536) / factor)
    assert torch.equal(values.bfloat16().float(), values)
    return values.bfloat16()


def rows(count: int, in_size: int, seed: int = 0) -> Tensor:
    return torch.randn(count, in_size, generator=torch.Generator().manual_seed(seed)).bfloat16()


pytestmark = pytest.mark.usefixtures("amx_level")


@pytest.mark.parametrize("type_name", TYPES)
def test_products_are_those_of_the_drawn_weights(type_name: str) -> None:
    for out_size, blocks, count in SHAPES:
        weight = draw(type_name, out_size, blocks * block_values(type_name), seed=count)
        kept = widened(type_name, weight)
        assert kept.half_scale > 0
        plain = kernels.pack_weight(drawn(type_name, weight, kept.half_scale))
        x = rows(count, weight.q.shape[1], seed=out_size)
        assert torch.equal(kernels.logits(x, kept), kernels.logits(x, plain)), (out_size, count)
        assert torch.equal(kernels.linear(x, kept), kernels.linear(x, plain)), (out_size, count)


@pytest.mark.parametrize("type_name", TYPES)
def test_any_number_of_rows_gives_the_same(type_name: str) -> None:
    """Inputs that take more than 16 rows two passes, and an odd number of blocks."""
    weight = draw(type_name, 40, 1536)
    kept, x = widened(type_name, weight), rows(400, 1536)
    expected = kernels.logits(x, kernels.pack_weight(drawn(type_name, weight, kept.half_scale)))
    for count in COUNTS:
        assert torch.equal(kernels.logits(x[:count], kept), expected[:count]), count
        assert torch.equal(kernels.logits(x[400 - count :], kept), expected[400 - count :]), count


@pytest.mark.parametrize("type_name", TYPES)
def test_a_weight_is_rounded_to_eight_bits(type_name: str) -> None:
    weight = draw(type_name, 64, 512)
    values, exact = drawn(type_name, weight, widened(type_name, weight).half_scale).float().numpy(), weight.values()
    error = np.abs(values - exact)
    # Half a step of 8 bits and, where an offset takes most of it away again, half a step of the half precision before.
    assert (error <= np.abs(exact) * 2**-8 + np.abs(exact).max() * 2**-10).all()
    assert error.max() > np.abs(exact).max() * 2**-10  # control: it is rounded


@pytest.mark.parametrize("type_name", ["Q4_1", "Q6_K"])
def test_other_weights_give_others(type_name: str) -> None:
    weight = draw(type_name, 32, 512)
    kept, x = widened(type_name, weight), rows(3, 512)
    right = drawn(type_name, weight, kept.half_scale)
    assert not torch.equal(kernels.logits(x, kept), kernels.logits(x, kernels.pack_weight(right.flip(1))))
    weight.scale[:, 2] *= np.float32(1.01)
    wrong = drawn(type_name, weight, kept.half_scale)
    assert not torch.equal(kernels.logits(x, kept), kernels.logits(x, kernels.pack_weight(wrong)))


@pytest.mark.parametrize("count", [1, 7, 20, 35, 64, 100, 450])
@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K", "Q6_K", "U4:32", "Q8_0"])
def test_what_follows_a_product_follows_it_here_too(type_name: str, count: int) -> None:
    in_size = block_values(type_name)
    weight, x = draw(type_name, 160, in_size), rows(count, in_size)
    kept, bias = widened(type_name, weight), torch.linspace(-1, 1, 160).bfloat16()
    plain = drawn(type_name, weight, kept.half_scale)
    wide = kernels.pack_weight(plain)
    assert torch.equal(kernels.linear(x, kept, bias), kernels.linear(x, wide, bias))
    residual = torch.randn(count, 160)
    assert torch.equal(
        kernels.linear_add(x, kept, bias, residual.clone(), 0.5),
        kernels.linear_add(x, wide, bias, residual.clone(), 0.5),
    )
    assert torch.equal(kernels.logits(x, kept, 2.0, 30.0), kernels.logits(x, wide, 2.0, 30.0))
    gated, wide_gated = widened(type_name, weight, gated=True), kernels.pack_weight(plain, gated=True)
    for given in (None, bias):
        for form in ("silu", "gelu", "gelu_tanh"):
            found = kernels.gated_linear(x, gated, given, form)
            assert torch.equal(found, kernels.gated_linear(x, wide_gated, given, form))


def test_parts_of_several_types_are_side_by_side() -> None:
    x, types = rows(40, 64), ["Q4_0", "Q8_0"]
    parts = tuple(widened(name, draw(name, size, 64)) for name, size in zip(types, (32, 16), strict=True))
    expected = torch.cat([kernels.linear(x, part) for part in parts], dim=1)
    assert torch.equal(kernels.linear(x, kernels.MergedWeight(parts)), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [4, 40, 300])
def test_what_is_not_finite_spoils_its_own_row_only(count: int, bad: float) -> None:
    kept, x = widened("Q5_1", draw("Q5_1", 32, 256)), rows(count, 256)
    clean = kernels.logits(x, kept)
    x[2, 19] = bad
    found = kernels.logits(x, kept)
    assert not found[2].isfinite().any()
    others = [row for row in range(count) if row != 2]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("power", [-60, -12, 8, 60])
@pytest.mark.parametrize("type_name", ["U4:32", "U4:128", "U8:64"])
def test_weights_may_be_of_any_size_a_float_has(type_name: str, power: int) -> None:
    """Also one that half precision does not have."""
    weight = draw(type_name, 32, 512)
    blocks = weight.data.reshape(-1, len(weight.data) * block_values(type_name) // (32 * 512)).copy()
    blocks[:, :4] = (blocks[:, :4].copy().view(np.float32) * np.float32(2.0**power)).view(np.uint8)
    x = rows(20, 512)
    expected = kernels.logits(x, widened(type_name, weight)) * 2.0**power
    assert torch.equal(kernels.logits(x, widened(type_name, replace(weight, data=blocks.reshape(-1)))), expected)


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("type_name", TYPES)
def test_a_matrix_of_zeros_or_with_a_scale_that_is_no_number_stays_with_integers(type_name: str, scale: float) -> None:
    weight = draw(type_name, 32, 2 * block_values(type_name))
    zeroed, at = type_name.startswith("U"), 208 if type_name == "Q6_K" else 0
    blocks = weight.data.reshape(64, -1).copy()
    ones = slice(None) if scale == 0.0 else slice(37, 38)
    places = (at, 2) if type_name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") and scale == 0.0 else (at,)
    for place in places:
        number = np.array([scale], np.float32 if zeroed else np.float16).view(np.uint8)
        blocks[ones, place : place + len(number)] = number
    kept = widened(type_name, replace(weight, data=blocks.reshape(-1)))
    assert kept.half_scale == 0.0
    assert widened(type_name, weight).half_scale != 0.0  # control


def test_a_matrix_whose_rows_end_within_a_group_stays_with_integers() -> None:
    weight = draw("U4:64", 16, 64)
    shape = (16, 48)
    kept = kernels.widened_in_products(kernels.pack_blocks("U4:64", weight.data, shape, torch.bfloat16))
    assert isinstance(kept, PackedWeight)
    assert kept.half_scale == 0.0


def test_what_is_no_quantized_matrix_of_bfloat16_stays_what_it_is() -> None:
    plain = kernels.pack_weight(rows(32, 64))
    assert kernels.widened_in_products(plain) is plain
    wide = kernels.pack_blocks("Q4_0", draw("Q4_0", 16, 32).data, (16, 32), torch.float32)
    assert kernels.widened_in_products(wide) is wide


def test_another_level_does_not_misread_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = widened("Q4_0", draw("Q4_0", 16, 32))
    monkeypatch.setenv("OCTAVO_CPU_ISA", "avx512")
    kernels.select("native")
    with pytest.raises(ValueError, match="another level"):
        kernels.logits(rows(1, 32), kept)
