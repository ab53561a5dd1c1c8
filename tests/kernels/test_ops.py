"""Each op, by its definition and by its kernel on each level, against plain numpy in double precision, over odd shapes
and all data types."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo import kernels

pytestmark = pytest.mark.usefixtures("level")
few = settings(max_examples=25, deadline=None, derandomize=True)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16]).filter(
    lambda dtype: dtype != torch.float16 or kernels.chosen_provider() == "torch"  # native kernels have no float16
)
floats = st.sampled_from([torch.float32, torch.bfloat16])
gates = st.sampled_from(["silu", "gelu", "gelu_tanh"])
multipliers = st.sampled_from([1.0, 0.22, -3.0])
sizes = st.integers(1, 70)
rows = st.integers(0, 9)
# One rounding to the type, and the float32 arithmetic before it.
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def double(x: Tensor) -> np.ndarray:
    return x.double().numpy()


def assert_rounded_once(got: Tensor, expected: np.ndarray) -> None:
    assert tuple(got.shape) == expected.shape
    np.testing.assert_allclose(double(got), expected, rtol=RELATIVE[got.dtype], atol=RELATIVE[got.dtype])


@few
@given(num_rows=rows, vocab_size=sizes, width=sizes, dtype=dtypes)
def test_embedding_takes_rows(num_rows: int, vocab_size: int, width: int, dtype: torch.dtype) -> None:
    table = random(vocab_size, width, dtype=dtype)
    ids = torch.arange(num_rows) * 7 % vocab_size
    assert_rounded_once(kernels.embedding(ids, table), double(table)[ids.numpy()])


@few
@given(num_rows=rows, dtype=dtypes, scale=st.sampled_from([0.25, 2.0, 7.9]))
def test_embedding_scales_the_rows(num_rows: int, dtype: torch.dtype, scale: float) -> None:
    table = random(11, 13, dtype=dtype)
    ids = torch.arange(num_rows) * 7 % 11
    got = kernels.embedding(ids, table, scale)
    assert got.dtype == dtype
    assert_rounded_once(got, double(table)[ids.numpy()] * scale)


@few
@given(num_rows=rows, width=sizes, dtype=dtypes, to=st.sampled_from([torch.float32, torch.bfloat16]))
def test_embedding_rounds_once_to_another_type(num_rows: int, width: int, dtype: torch.dtype, to: torch.dtype) -> None:
    table = random(40, width, dtype=dtype)
    ids = torch.arange(num_rows) * 7 % 40
    got = kernels.embedding(ids, kernels.pack_weight(table), 1.7, to)
    assert got.dtype == to
    assert torch.equal(got, (table.float() * torch.tensor(1.7)).to(to)[ids])


@few
@given(num_rows=rows, width=sizes, dtype=dtypes, to=st.sampled_from([torch.float32, torch.bfloat16]))
def test_cast_rounds_to_the_nearest_and_keeps_what_is_no_number(
    num_rows: int, width: int, dtype: torch.dtype, to: torch.dtype
) -> None:
    extreme = torch.tensor([float("inf"), float("nan"), 1e-40, -0.0, 1.00390625, 1.01171875, 3.4e38, -3.39e38])
    x = torch.cat([random(num_rows, width), extreme.expand(num_rows, 8)], dim=1).to(dtype)[:, 1:]
    got = kernels.cast(x, to)
    assert got.dtype == to
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got.nan_to_num(7.0, float("inf")), x.to(to).nan_to_num(7.0, float("inf")))


@few
@given(num_rows=rows, inner=sizes, outer=sizes, dtype=floats, bias=st.booleans())
def test_linear(num_rows: int, inner: int, outer: int, dtype: torch.dtype, bias: bool) -> None:
    x, weight = random(num_rows, inner, dtype=dtype), random(outer, inner, dtype=dtype, seed=1, scale=0.3)
    offset = random(outer, dtype=dtype, seed=2) if bias else None
    expected = double(x) @ double(weight).T + (0 if offset is None else double(offset))
    got = kernels.linear(x, weight, offset)
    assert got.dtype == dtype
    np.testing.assert_allclose(double(got), expected, rtol=RELATIVE[dtype], atol=8 * RELATIVE[dtype])


@few
@given(num_rows=rows, width=sizes, vocab_size=st.sampled_from([1, 1023, 1025, 2500]), dtype=dtypes)
def test_logits_are_not_rounded(num_rows: int, width: int, vocab_size: int, dtype: torch.dtype) -> None:
    hidden, weight = random(num_rows, width, dtype=dtype), random(vocab_size, width, dtype=dtype, seed=1)
    got = kernels.logits(hidden, weight)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(double(got), double(hidden) @ double(weight).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_are_scaled_and_then_capped(scale: float, softcap: float | None) -> None:
    hidden, weight = random(5, 40), random(1030, 40, seed=1)
    expected = double(hidden) @ double(weight).T * scale
    if softcap is not None:
        expected = softcap * np.tanh(expected / softcap)
    got = kernels.logits(hidden, weight, scale, softcap)
    np.testing.assert_allclose(double(got), expected, rtol=1e-5, atol=1e-5)


@few
@given(num_rows=rows, inner=sizes, outer=sizes, dtype=floats, bias=st.booleans(), multiplier=multipliers)
def test_linear_add_adds_the_product_to_the_residual(
    num_rows: int, inner: int, outer: int, dtype: torch.dtype, bias: bool, multiplier: float
) -> None:
    x, weight = random(num_rows, inner, dtype=dtype), random(outer, inner, dtype=dtype, seed=1, scale=0.3)
    offset = random(outer, dtype=dtype, seed=2) if bias else None
    residual = random(num_rows, outer, seed=3)
    before = residual.clone()
    product = double(x) @ double(weight).T + (0 if offset is None else double(offset))
    got = kernels.linear_add(x, weight, offset, residual, multiplier)
    assert got is residual
    # The definition rounds the product, kernels do not.
    exact = RELATIVE[dtype if kernels.chosen_provider() == "torch" else torch.float32]
    np.testing.assert_allclose(double(got), double(before) + product * multiplier, rtol=exact, atol=8 * exact)


@few
@given(num_rows=rows, inner=sizes, size=sizes, dtype=floats, bias=st.booleans(), activation=gates)
def test_gated_linear_multiplies_the_halves_of_a_product(
    num_rows: int, inner: int, size: int, dtype: torch.dtype, bias: bool, activation: Any
) -> None:
    x, weight = random(num_rows, inner, dtype=dtype), random(2 * size, inner, dtype=dtype, seed=1, scale=0.3)
    offset = random(2 * size, dtype=dtype, seed=2) if bias else None
    gate, up = np.split(double(x) @ double(weight).T + (0 if offset is None else double(offset)), 2, axis=-1)
    got = kernels.gated_linear(x, kernels.pack_weight(weight, gated=True), offset, activation)
    assert got.dtype == dtype
    rounded = RELATIVE[dtype] * (8 if kernels.chosen_provider() == "torch" else 1)  # the definition rounds three times
    expected = numpy_gate(gate, activation) * up
    np.testing.assert_allclose(double(got), expected, rtol=rounded, atol=8 * rounded)


def numpy_rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@few
@given(num_rows=rows, width=sizes, dtype=dtypes, scale=st.sampled_from([1e-4, 1.0, 100.0]))
def test_rms_norm(num_rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    x, weight = random(num_rows, width, dtype=dtype, scale=scale), random(width, dtype=dtype, seed=1)
    before = x.clone()
    expected = numpy_rms_norm(double(x), double(weight), 1e-5)
    assert_rounded_once(kernels.rms_norm(x, weight, 1e-5), expected)
    assert torch.equal(x, before)


@few
@given(num_rows=rows, width=sizes, dtype=dtypes, heads=st.integers(1, 3))
def test_rms_norm_of_each_head_with_float32_weights(num_rows: int, width: int, dtype: torch.dtype, heads: int) -> None:
    x, weight = random(num_rows, heads, width, dtype=dtype), random(width, seed=1)
    assert_rounded_once(kernels.rms_norm(x, weight, 1e-5), numpy_rms_norm(double(x), double(weight), 1e-5))


@few
@given(num_rows=rows, width=sizes, dtype=dtypes)
def test_rms_norm_add_adds_to_the_residual_in_float32(num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    residual = random(num_rows, width, seed=2)
    before = residual.clone()
    got = kernels.rms_norm_add(x, weight, 1e-5, residual)
    assert got is residual
    assert_rounded_once(got, numpy_rms_norm(double(x), double(weight), 1e-5) + double(before))


@few
@given(
    num_rows=rows,
    heads=st.integers(1, 3),
    width=sizes,
    dtype=dtypes,
    to=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_norms_read_heads_out_of_wider_rows_and_round_to_another_type(
    num_rows: int, heads: int, width: int, dtype: torch.dtype, to: torch.dtype
) -> None:
    wide = random(num_rows, (heads + 2) * width, dtype=dtype)
    x = wide[:, width : (heads + 1) * width].view(num_rows, heads, width)
    weight, by_head = random(width, seed=1), random(heads, width, dtype=dtype, seed=2)
    normed = kernels.rms_norm(x, weight, 1e-5, to)
    centered = kernels.layer_norm(x, by_head, None, 1e-2, to)
    assert normed.dtype == centered.dtype == to
    assert_rounded_once(normed, numpy_rms_norm(double(x), double(weight), 1e-5))
    assert_rounded_once(centered, numpy_layer_norm(double(x), double(by_head), 0.0, 1e-2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_extreme_rows(dtype: torch.dtype) -> None:
    weight = torch.ones(40, dtype=dtype)
    rows = torch.stack([torch.zeros(40), torch.full((40,), 1e18), torch.full((40,), 1e-30), random(40)]).to(dtype)
    rows[3, 7] = float("nan")
    got = kernels.rms_norm(rows, weight, 1e-5)
    assert_rounded_once(got[:3], numpy_rms_norm(double(rows[:3]), double(weight), 1e-5))
    assert got[3].isnan().all()
    assert kernels.layer_norm(rows, weight, None, 1e-5)[3].isnan().all()
    assert not kernels.layer_norm(rows[:1], weight, None, 1e-5).any()


def numpy_layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | float, eps: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


@few
@given(num_rows=rows, width=sizes, dtype=dtypes, offset=st.sampled_from([0.0, 30.0]), with_bias=st.booleans())
def test_layer_norm(num_rows: int, width: int, dtype: torch.dtype, offset: float, with_bias: bool) -> None:
    x = random(num_rows, width) * 2 + offset
    weight, bias = random(width, dtype=dtype, seed=1), random(width, dtype=dtype, seed=2) if with_bias else None
    before = x.clone()
    expected = numpy_layer_norm(double(x), double(weight), 0.0 if bias is None else double(bias), 1e-2)
    np.testing.assert_allclose(double(kernels.layer_norm(x, weight, bias, 1e-2)), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(x, before)
    assert_rounded_once(
        kernels.layer_norm(x.to(dtype), weight, bias, 1e-2),
        numpy_layer_norm(double(x.to(dtype)), double(weight), 0.0 if bias is None else double(bias), 1e-2),
    )


def test_layer_norm_with_weights_of_each_head() -> None:
    x, weight = random(9, 3, 20), random(3, 20, seed=1)
    by_head = [kernels.layer_norm(x[:, head].contiguous(), weight[head], None, 1e-2) for head in range(3)]
    assert torch.equal(kernels.layer_norm(x, weight, None, 1e-2), torch.stack(by_head, dim=1))


def numpy_gate(x: np.ndarray, activation: str) -> np.ndarray:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    return numpy_gelu(x, "tanh" if activation == "gelu_tanh" else "none")


def numpy_gelu(x: np.ndarray, approximate: str) -> np.ndarray:
    if approximate == "tanh":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))


@few
@given(num_rows=rows, width=sizes, dtype=dtypes, approximate=st.sampled_from(["none", "tanh"]))
def test_gelu_in_both_forms(num_rows: int, width: int, dtype: torch.dtype, approximate: Any) -> None:
    x = random(num_rows, width + 3, dtype=dtype, scale=2.0)[:, 2:-1]
    assert_rounded_once(kernels.gelu(x, approximate), numpy_gelu(double(x), approximate))


def test_control_the_two_forms_of_gelu_differ() -> None:
    x = random(9, 70, scale=2.0)
    with pytest.raises(AssertionError):
        assert_rounded_once(kernels.gelu(x, "tanh"), numpy_gelu(double(x), "none"))


@few
@given(
    num_rows=rows,
    num_heads=st.integers(1, 5),
    half=st.integers(1, 20),
    rest=st.sampled_from([0, 2, 6]),
    block_size=st.sampled_from([3, 8, 16, 32]),
    dtype=dtypes,
)
def test_rotary_turns_pairs_of_channels_and_writes_keys_and_values(
    num_rows: int, num_heads: int, half: int, rest: int, block_size: int, dtype: torch.dtype
) -> None:
    head_size = 2 * half + rest
    angles = np.outer(np.arange(50), 0.7 ** np.arange(half))
    table = torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).float()
    positions = torch.arange(num_rows) * 13 % 50
    slots = (torch.arange(num_rows) * 11 + 5) % (5 * block_size)
    # The runner's queries, keys and values are views into one wide product.
    wide = random(num_rows, num_heads + 4, head_size, dtype=dtype)
    query, keys, values = wide[:, :num_heads], wide[:, num_heads : num_heads + 2], wide[:, num_heads + 2 :]
    cache = torch.full((5, 2, block_size, 2, head_size), float("nan"), dtype=dtype)
    got = kernels.rotary_and_cache(positions, query, keys, values, table, cache, slots)

    turned = np.exp(1j * angles[positions.numpy()])[:, None, :]
    pairs = (double(query)[..., :half] + 1j * double(query)[..., half : 2 * half]) * turned
    expected = np.concatenate([pairs.real, pairs.imag, double(query)[..., 2 * half :]], axis=-1)
    np.testing.assert_allclose(double(got), expected, rtol=RELATIVE[dtype], atol=4 * RELATIVE[dtype])

    # A key is turned as a query is, bit for bit, and written as it is without rotary embedding.
    other = torch.full_like(cache, float("nan"))
    rotated = kernels.rotary_and_cache(positions, keys, keys, values, table, other.clone(), slots)
    kernels.reshape_and_cache(rotated, values, other, slots)
    assert torch.equal(cache.nan_to_num(9.0), other.nan_to_num(9.0))


def test_control_the_tolerance_tells_a_wrong_epsilon() -> None:
    x, weight = random(3, 40, scale=0.01), random(40, seed=1)
    with pytest.raises(AssertionError):
        assert_rounded_once(kernels.rms_norm(x, weight, 1e-5), numpy_rms_norm(double(x), double(weight), 1e-6))
