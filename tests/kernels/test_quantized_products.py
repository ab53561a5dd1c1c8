"""Products with weights that stay quantized: exactly the integers, for every type, level, shape and number of rows."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from octavo import kernels
from octavo.checkpoints import readable_type, to_float32
from tests.kernels import amx, quantized_blocks
from tests.kernels.quantized_blocks import TYPES, block_values, draw, product

# (outputs, blocks of inputs, rows): outputs that sixteen does not divide, an odd number of packed blocks, rows beyond
# every tile, and more inputs than the second-level cache takes of that many rows.
SHAPES = [(16, 1, 1), (40, 3, 2), (33, 2, 13), (64, 5, 7), (96, 1, 70)]
# One row, what level amx leaves to vectors and where its tiles begin, whole tiles, and one row less and more.
COUNTS = [1, 3, 4, 12, 15, 16, 17, 31, 32, 33, 36, 48, 49, 64, 65, 100]


pytestmark = pytest.mark.usefixtures("native_level")


def rows(count: int, in_size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, in_size, generator=generator).to(dtype)


def packed(type_name: str, weight: quantized_blocks.Weight, dtype: torch.dtype, gated: bool = False) -> kernels.Weight:
    return kernels.pack_blocks(type_name, weight.data, (weight.q.shape[0], weight.q.shape[1]), dtype, gated)


@pytest.mark.parametrize("type_name", TYPES)
def test_the_oracle_reads_types_as_checkpoints_are_read(type_name: str) -> None:
    weight = draw(type_name, 5, 2 * block_values(type_name))
    assert np.array_equal(weight.values(), to_float32(type_name, weight.data).reshape(weight.q.shape))
    if not type_name.startswith("U"):
        blocks = weight.data.reshape(5, -1)
        assert np.array_equal(weight.values(), quants.dequantize(blocks, GGMLQuantizationType[type_name]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("type_name", TYPES)
def test_products_are_exact_sums_of_integers_scaled_group_by_group(
    type_name: str, dtype: torch.dtype, native_level: str
) -> None:
    for out_size, blocks, count in SHAPES:
        weight = draw(type_name, out_size, blocks * block_values(type_name), seed=count)
        x = rows(count, weight.q.shape[1], dtype, seed=out_size)
        found = kernels.logits(x, packed(type_name, weight, dtype)).numpy()
        assert np.array_equal(found, product(x.float().numpy(), weight, fused=native_level != "generic")), (
            out_size,
            count,
        )


@pytest.mark.parametrize("type_name", TYPES)
def test_levels_that_only_multiply_integers_leave_a_matrix_as_it_is(type_name: str, native_level: str) -> None:
    kept = packed(type_name, draw(type_name, 32, block_values(type_name)), torch.bfloat16)
    found = kernels.widened_in_products(kept)
    assert isinstance(found, kernels.PackedWeight)
    assert (found.half_scale != 0.0) == (native_level == "amx" and amx.has_halves())


def test_the_oracle_notices_another_order_and_another_scale(native_level: str) -> None:
    weight = draw("Q4_1", 32, 512)
    x = rows(3, 512, torch.float32)
    found = kernels.logits(x, packed("Q4_1", weight, torch.float32)).numpy()
    backwards = draw("Q4_1", 32, 512)
    backwards.q, backwards.scale = backwards.q[:, ::-1], backwards.scale[:, ::-1]
    backwards.offset = backwards.offset[:, ::-1]
    other = product(x.numpy()[:, ::-1], backwards, fused=native_level != "generic")
    assert not np.array_equal(found, other)
    assert np.allclose(found, other, atol=1e-3)
    weight.scale[:, 2] *= np.float32(1.001)
    assert not np.array_equal(found, product(x.numpy(), weight, fused=native_level != "generic"))


@pytest.mark.parametrize("type_name", TYPES)
def test_a_row_has_the_same_bits_alone_and_among_a_hundred(type_name: str) -> None:
    weight = draw(type_name, 48, 2 * block_values(type_name))
    x = rows(100, weight.q.shape[1])
    kept = packed(type_name, weight, torch.bfloat16)
    together = kernels.logits(x, kept)
    for count in (1, 2, 3, 5, 11, 64):
        parts = torch.cat([kernels.logits(x[i : i + count], kept) for i in range(0, 100, count)])
        assert torch.equal(parts, together), count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("type_name", TYPES)
def test_any_number_of_rows_gives_the_same_exact_sums(type_name: str, dtype: torch.dtype, native_level: str) -> None:
    """Inputs that take level amx two passes, and an odd number of blocks."""
    weight = draw(type_name, 40, 1536)
    x = rows(100, 1536, dtype)
    kept = packed(type_name, weight, dtype)
    expected = product(x.float().numpy(), weight, fused=native_level != "generic")
    for count in COUNTS:
        assert np.array_equal(kernels.logits(x[:count], kept).numpy(), expected[:count]), count
        assert np.array_equal(kernels.logits(x[100 - count :], kept).numpy(), expected[100 - count :]), count


@pytest.mark.parametrize("type_name", TYPES)
def test_packed_weights_are_no_larger_than_the_checkpoint_has_them(type_name: str) -> None:
    weight = draw(type_name, 64, 8 * 256)
    kept = packed(type_name, weight, torch.bfloat16)
    assert isinstance(kept, kernels.PackedWeight)
    limit = 1.03 if type_name in ("Q4_K", "Q5_K") else 1.0
    assert kept.data.nbytes <= limit * weight.data.nbytes


@pytest.mark.parametrize("type_name", TYPES)
def test_embeddings_are_the_rows_that_checkpoints_are_read_as(type_name: str) -> None:
    weight = draw(type_name, 40, 2 * block_values(type_name))
    ids = torch.tensor([39, 0, 17, 17, 16])
    found = kernels.embedding(ids, packed(type_name, weight, torch.bfloat16), 1.0, torch.float32)
    assert np.array_equal(found.numpy(), weight.values()[ids])
    narrow = kernels.embedding(ids, packed(type_name, weight, torch.bfloat16), 3.0)
    assert torch.equal(narrow, (torch.from_numpy(weight.values())[ids] * 3.0).bfloat16())


@pytest.mark.parametrize("count", [7, 35])
@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K", "Q6_K", "U4:32"])
def test_what_follows_a_product_follows_it_here_too(type_name: str, count: int) -> None:
    in_size = block_values(type_name)
    weight, x = draw(type_name, 80, in_size), rows(count, in_size)
    kept = packed(type_name, weight, torch.bfloat16)
    bias = torch.linspace(-1, 1, 80).bfloat16()
    sums = kernels.logits(x, kept)
    assert torch.equal(kernels.linear(x, kept, bias), (sums + bias.float()).bfloat16())
    residual = torch.randn(count, 80)
    assert torch.equal(kernels.linear_add(x, kept, bias, residual.clone(), 0.5), residual + (sums + bias.float()) * 0.5)
    assert torch.equal(kernels.logits(x, kept, 2.0), sums * 2.0)
    gated = packed(type_name, weight, torch.bfloat16, gated=True)
    gate, up = (sums + bias.float()).split(40, dim=1)
    found = kernels.gated_linear(x, gated, bias, "silu").float()
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("count", [5, 40])
def test_a_merged_weight_is_its_parts_side_by_side(count: int) -> None:
    types = ["Q4_0", "Q8_0", ""]
    x, bias = rows(count, 64), torch.linspace(-1, 1, 32 + 16 + 24).bfloat16()
    wide = torch.randn(24, 64).bfloat16()
    parts = [
        kernels.pack_weight(wide) if not name else packed(name, draw(name, size, 64), torch.bfloat16)
        for name, size in zip(types, (32, 16, 24), strict=True)
    ]
    merged = kernels.MergedWeight(tuple(part for part in parts if isinstance(part, kernels.PackedWeight)))
    assert merged.shape == (72, 64)
    biases = bias.split([32, 16, 24])
    expected = [kernels.linear(x, part, own) for part, own in zip(parts, biases, strict=True)]
    assert torch.equal(kernels.linear(x, merged, bias), torch.cat(expected, dim=1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("count", [4, 40])
@pytest.mark.parametrize("type_name", TYPES)
def test_what_is_not_finite_spoils_its_own_row_only(type_name: str, count: int, bad: float) -> None:
    weight = draw(type_name, 32, block_values(type_name))
    x = rows(count, weight.q.shape[1])
    kept = packed(type_name, weight, torch.bfloat16)
    clean = kernels.logits(x, kept)
    x[2, 19] = bad
    found = kernels.logits(x, kept)
    assert found[2].isnan().all()
    others = [row for row in range(count) if row != 2]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("count", [2, 40])
def test_groups_of_zeros_and_of_tiny_numbers_add_nothing(count: int) -> None:
    weight = draw("Q4_1", 32, 96)
    x = rows(count, 96, torch.float32)
    x[:, 32:64] = 0.0
    expected = kernels.logits(x, packed("Q4_1", weight, torch.float32))
    x[:, 32:64] = 1e-38
    assert torch.equal(kernels.logits(x, packed("Q4_1", weight, torch.float32)), expected)


def eight_bit_floats(out_size: int, in_size: int, span: int, seed: int = 0) -> np.ndarray:
    """Blocks of F8_E4M3:span: any numbers but NaN, with scales of about 0.01."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 256, (out_size, in_size // span, span), np.uint8)
    numbers[(numbers & 0x7F) == 0x7F] = 0
    scales = (rng.standard_normal(numbers.shape[:2]) * 0.01).astype(np.float32)
    return np.concatenate([scales[..., None].view(np.uint8), numbers], axis=-1).reshape(-1)


@pytest.mark.parametrize("span", [32, 128])
def test_8_bit_floats_give_the_bits_of_the_same_weights_in_bfloat16(span: int) -> None:
    name = f"F8_E4M3:{span}"
    assert kernels.keeps(name)
    for out_size, blocks, count in [(16, 1, 1), (40, 3, 2), (33, 2, 13), (64, 5, 70), (1100, 6, 500), (96, 2, 300)]:
        in_size = blocks * span
        data = eight_bit_floats(out_size, in_size, span, seed=count)
        values = torch.from_numpy(to_float32(name, data).reshape(out_size, in_size))
        kept = kernels.pack_blocks(name, data, (out_size, in_size), torch.bfloat16)
        assert isinstance(kept, kernels.PackedWeight)
        assert kept.data.nbytes * out_size <= len(data) * (out_size + 15) // 16 * 16
        x = rows(count, in_size)
        assert torch.equal(kernels.logits(x, kept), kernels.logits(x, kernels.pack_weight(values.bfloat16())))
        ids = torch.tensor([out_size - 1, 0, 7])
        assert torch.equal(kernels.embedding(ids, kept, 1.0, torch.float32), values[ids])
    gated = kernels.pack_blocks(name, data, (out_size, in_size), torch.bfloat16, gated=True)
    wide = kernels.pack_weight(values.bfloat16(), gated=True)
    assert torch.equal(kernels.gated_linear(x, gated, None, "silu"), kernels.gated_linear(x, wide, None, "silu"))


def test_every_8_bit_float_is_what_torch_says() -> None:
    numbers = np.arange(256, dtype=np.uint8).repeat(32).reshape(256, 32)
    data = np.concatenate([np.ones((256, 1), np.float32).view(np.uint8), numbers], axis=1).reshape(-1)
    kept = kernels.pack_blocks("F8_E4M3:32", data, (256, 32), torch.bfloat16)
    x = torch.zeros(1, 32).bfloat16()
    x[0, 5] = 1.0
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(kernels.logits(x, kept)[0].nan_to_num(7.0), expected.nan_to_num(7.0))
    assert expected.isnan().sum() == 2


def test_8_bit_floats_are_not_kept_for_products_in_float32() -> None:
    with pytest.raises(ValueError, match="widened to bfloat16"):
        kernels.empty_weight((32, 32), torch.float32, False, "F8_E4M3:32")


def test_rows_are_packed_in_any_pieces() -> None:
    weight = draw("Q5_K", 50, 512)
    whole = packed("Q5_K", weight, torch.bfloat16)
    pieces = kernels.empty_weight((50, 512), torch.bfloat16, False, "Q5_K")
    data = weight.data.reshape(50, -1)
    for first, last in ((17, 50), (0, 3), (3, 17)):
        kernels.fill_blocks(pieces, first, data[first:last].reshape(-1))
    assert isinstance(whole, kernels.PackedWeight)
    assert isinstance(pieces, kernels.PackedWeight)
    assert torch.equal(whole.data, pieces.data)


def test_wrong_rows_and_types_are_refused() -> None:
    kept = kernels.empty_weight((32, 64), torch.bfloat16, False, "Q8_0")
    with pytest.raises(ValueError, match="are not rows of 68 bytes"):
        kernels.fill_blocks(kept, 0, np.zeros(67, np.uint8))
    with pytest.raises(ValueError, match="at row 31"):
        kernels.fill_blocks(kept, 31, np.zeros(2 * 68, np.uint8))
    with pytest.raises(TypeError, match="kept quantized"):
        kernels.fill_rows(kept, 0, torch.zeros(32, 64))
    with pytest.raises(ValueError, match="Q2_K are not kept"):
        kernels.empty_weight((32, 256), torch.bfloat16, False, "Q2_K")
    for name in TYPES:
        assert kernels.keeps(name)
        assert readable_type(name).block_size == block_values(name)
    for name in ("Q2_K", "BF16", "U4:48", "U4:", "U4:x", "F32", ""):
        assert not kernels.keeps(name)
