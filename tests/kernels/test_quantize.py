"""Numbers are quantized to the same blocks by every level, in GGUF's form, with less error than the plain ways."""

import math

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.checkpoints import to_float32
from octavo.kernels.quantize import quantize as op

Blocks = npt.NDArray[np.uint8]
TYPES = {"Q8_0": 34, "Q4_1": 20}
SHAPES = [(1, 1), (2, 7), (3, 32), (5, 33), (17, 96), (40, 80), (19, 352)]
pytestmark = pytest.mark.usefixtures("level")


def rows_of(shape: tuple[int, int], spread: float = 1.0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))
    return drawn * spread * torch.logspace(-2, 1, shape[0])[:, None]


def special_rows() -> Tensor:
    """What a group may be that no model's weights are on purpose."""
    steps = torch.arange(32) % 16
    rows = [
        torch.zeros(32),
        -torch.zeros(32),
        torch.cat([torch.zeros(16), -torch.zeros(16)]),
        torch.ones(32) * 0.3,
        torch.ones(32) * -1e-9,  # rounds to -0
        (steps - 8) * 0.25,
        (8 - steps) * 0.25,
        steps * 0.1 + 3.0,
        torch.cat([torch.tensor([65504.0, -65504.0]), torch.randn(30)]),
        torch.cat([torch.tensor([65504.0]), torch.zeros(31)]),
        torch.full((32,), -65504.0),
        torch.randn(32) * 1e-6,
        torch.randn(32) * 2**-23,
        torch.randn(32) * 1e-30,
        1000 + torch.randn(32) * 1e-3,
        torch.randn(32) ** 5,
        torch.cat([-torch.rand(31), torch.tensor([9.0])]),
    ]
    return torch.stack(rows)


def error_of(type_name: str, blocks: Blocks, rows: Tensor) -> npt.NDArray[np.float64]:
    """Squared, of each group; rows of whole groups."""
    found = to_float32(type_name, blocks.reshape(-1)).astype(np.float64)
    off = found - rows.float().numpy().reshape(-1).astype(np.float64)
    return (off**2).reshape(-1, 32).sum(1)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_have_the_bits_of_the_definition(type_name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows = rows_of(shape).to(dtype)
    blocks = kernels.quantize(type_name, rows)
    assert blocks.dtype == np.uint8
    assert blocks.shape == (shape[0] * math.ceil(shape[1] / 32) * TYPES[type_name],)
    assert np.array_equal(blocks, op.definition(type_name, rows))


@pytest.mark.parametrize("type_name", TYPES)
def test_groups_of_any_kind_have_the_bits_of_the_definition(type_name: str) -> None:
    rows = special_rows()
    blocks = kernels.quantize(type_name, rows)
    assert np.array_equal(blocks, op.definition(type_name, rows))
    assert np.isfinite(to_float32(type_name, blocks)).all()


def test_control_another_search_has_other_bits(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of((17, 96))
    blocks = kernels.quantize("Q4_1", rows)
    monkeypatch.setitem(op.definition.__globals__, "_STEPS", 2)
    assert not np.array_equal(blocks, op.definition("Q4_1", rows))


@pytest.mark.parametrize("type_name", TYPES)
def test_rows_are_quantized_one_by_one(type_name: str) -> None:
    """Pieces of a matrix, which threads share, give what the whole gives."""
    rows = rows_of((40, 80)).bfloat16()
    parts = [kernels.quantize(type_name, rows[first : first + 7]) for first in range(0, 40, 7)]
    assert np.array_equal(kernels.quantize(type_name, rows), np.concatenate(parts))


def test_rows_may_lie_anywhere() -> None:
    raw = np.zeros(1 + 6 * 96 * 4, np.uint8)
    rows = torch.from_numpy(raw[1:]).view(torch.float32).view(6, 96)
    rows[:] = rows_of((6, 96))
    assert rows.data_ptr() % 4 == 1
    assert np.array_equal(kernels.quantize("Q4_1", rows), op.definition("Q4_1", rows.clone()))


@pytest.mark.parametrize("type_name", TYPES)
def test_blocks_are_gguf_s(type_name: str) -> None:
    rows = torch.cat([rows_of((64, 32)), special_rows()])
    blocks = kernels.quantize(type_name, rows)
    kind = gguf.GGMLQuantizationType[type_name]
    assert np.array_equal(gguf.quants.dequantize(blocks, kind), to_float32(type_name, blocks))


def test_a_row_s_last_group_is_filled_up_with_zeros() -> None:
    rows = rows_of((3, 40))
    padded = torch.zeros(3, 64)
    padded[:, :40] = rows
    for type_name in TYPES:
        assert np.array_equal(kernels.quantize(type_name, rows), kernels.quantize(type_name, padded))


def from_minimum_to_maximum(rows: Tensor) -> npt.NDArray[np.float64]:
    """Squared error of each group with the plain scales of Q4_1, rounded to halves before they are used."""
    groups = rows.numpy().reshape(-1, 32)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    d = ((high - low) / 15).astype(np.float16).astype(np.float64)
    m = low.astype(np.float16).astype(np.float64)
    q = np.clip(np.rint((groups - m) / np.where(d, d, 1)), 0, 15)
    return ((q * d + m - groups) ** 2).sum(1)


def test_no_group_is_worse_than_from_its_minimum_to_its_maximum(level: str) -> None:
    rows = rows_of((300, 96))
    plain, found = from_minimum_to_maximum(rows), error_of("Q4_1", kernels.quantize("Q4_1", rows), rows)
    assert (found <= plain * 1.0001).all()
    assert found.sum() < 0.85 * plain.sum()


def test_four_bits_are_better_than_llama_cpp_s_reference(level: str) -> None:
    rows = rows_of((300, 96))
    found = error_of("Q4_1", kernels.quantize("Q4_1", rows), rows).sum()
    for name, most in (("Q4_1", 0.85), ("Q4_0", 0.75)):
        theirs = gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType[name])
        assert found < most * error_of(name, theirs, rows).sum(), name


def test_eight_bits_are_no_worse_than_llama_cpp_s_reference(level: str) -> None:
    rows = rows_of((300, 96))
    theirs = gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType.Q8_0)
    found = error_of("Q8_0", kernels.quantize("Q8_0", rows), rows)
    assert found.sum() <= error_of("Q8_0", theirs, rows).sum() * 1.001


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
def test_what_was_quantized_before_is_found_again(level: str, name: str) -> None:
    """Symmetrically or not: weights that lie on such a grid lose nothing."""
    rng = np.random.default_rng(3)
    q = np.concatenate([np.tile(np.arange(16), 2), rng.integers(0, 16, 32 * 9)]).reshape(-1, 32)
    q[:, :2] = (0, 15)
    d = rng.uniform(0.01, 2, (len(q), 1)).astype(np.float16).astype(np.float32)
    m = d * -8 if name == "Q4_0" else rng.uniform(-3, 3, (len(q), 1)).astype(np.float16).astype(np.float32)
    rows = torch.from_numpy(q.astype(np.float32) * d + m)
    assert error_of("Q4_1", kernels.quantize("Q4_1", rows), rows).max() < 1e-4


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 65520.0])
@pytest.mark.parametrize("place", [0, 31, 39])
def test_what_cannot_be_kept_is_refused(type_name: str, value: float, place: int) -> None:
    rows = rows_of((3, 40))
    kernels.quantize(type_name, rows)
    rows[1, place] = value
    with pytest.raises(ValueError, match="not finite, or larger than 65504"):
        kernels.quantize(type_name, rows)


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"only to Q4_1, Q8_0|no such type"):
        kernels.quantize("Q5_0", rows_of((3, 32)))
