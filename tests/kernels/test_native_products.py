"""What products on every level promise: what follows a product has the same bits whatever the rows around and however
many threads, levels that round alike agree, and numbers at the ends of their range come out as they should."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo import kernels
from octavo.kernels.native import available_levels

few = settings(max_examples=25, deadline=None, derandomize=True)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Calling it chooses a level and the number of threads."""

    def use(level: str, threads: int = 2) -> None:
        monkeypatch.setenv("OCTAVO_CPU_ISA", level)
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(threads)))
        kernels.select("native")

    yield use
    kernels.select("torch")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def everything(x: Tensor, outer: int, rows: slice = slice(None)) -> list[Tensor]:
    """Each op that ends in a product, of some rows of x; ``outer``: its outputs, an even number."""
    weight, bias = random(outer, x.shape[1], dtype=x.dtype, seed=1), random(outer, dtype=x.dtype, seed=2)
    residual = random(x.shape[0], outer, seed=3)[rows]
    packed, gated, x = kernels.pack_weight(weight), kernels.pack_weight(weight, gated=True), x[rows]
    return [
        kernels.linear(x, packed, bias),
        kernels.linear_add(x, packed, bias, residual.clone(), 0.22),
        kernels.linear_add(x, packed, None, residual.clone()),
        kernels.logits(x, packed, 3.0, 5.0),
        kernels.gated_linear(x, gated, None, "silu"),
        kernels.gated_linear(x, gated, bias, "gelu"),
        kernels.gated_linear(x, gated, bias, "gelu_tanh"),
    ]


@pytest.mark.parametrize("level", available_levels())
def test_what_follows_a_product_has_the_same_bits_alone_and_among_others(
    level: str, two_threads: Callable[..., None]
) -> None:
    two_threads(level)

    @few
    @given(
        num_rows=st.sampled_from([1, 2, 6, 7, 12, 13, 24, 25, 64, 300]),
        inner=st.integers(1, 150),
        outer=st.sampled_from([2, 30, 32, 34, 64, 66, 130]),
        dtype=dtypes,
    )
    def check(num_rows: int, inner: int, outer: int, dtype: torch.dtype) -> None:
        x = random(num_rows, inner, dtype=dtype)
        together = everything(x, outer)
        for row in {0, num_rows // 2, num_rows - 1}:
            alone = everything(x, outer, slice(row, row + 1))
            assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))

    check()


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 40, 600])
def test_one_thread_and_two_give_the_same_bits(
    level: str, dtype: torch.dtype, num_rows: int, two_threads: Callable[..., None]
) -> None:
    x = random(num_rows, 500, dtype=dtype)  # 600 rows of it are more than stays in the cache at once
    two_threads(level, 1)
    one = everything(x, 334)
    two_threads(level, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, everything(x, 334), strict=True))


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize(("num_rows", "outer"), [(33, 98), (500, 98), (400, 1100)])
def test_a_row_of_many_inputs_has_the_same_bits_alone(
    level: str, num_rows: int, outer: int, two_threads: Callable[..., None]
) -> None:
    """Inputs that do not stay in the cache are multiplied in parts, of many outputs some at a time; the last part has a
    step that is not full."""
    two_threads(level)
    x = random(num_rows, 1501 if outer < 1000 else 701, dtype=torch.bfloat16)
    together = everything(x, outer)
    for row in (0, 17, num_rows - 1):
        alone = everything(x, outer, slice(row, row + 1))
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_levels_of_float32_multiplications_with_one_rounding_agree(
    dtype: torch.dtype, two_threads: Callable[..., None]
) -> None:
    """avx512 and avx2 add the same products in the same order, each with one rounding."""
    found = []
    for level in {"avx512", "avx2"} & set(available_levels()):
        two_threads(level)
        found.append(everything(random(33, 101, dtype=dtype), 70))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True))


@pytest.mark.parametrize("level", available_levels())
def test_numbers_at_the_ends_of_their_range(level: str, two_threads: Callable[..., None]) -> None:
    two_threads(level)
    inf, nan = float("inf"), float("nan")
    x = random(14, 37, dtype=torch.bfloat16)
    x[1, 0], x[3, 36], x[5, 7], x[5, 8], x[8, 2] = inf, -inf, inf, -inf, nan
    weight = kernels.pack_weight(torch.ones(70, 37, dtype=torch.bfloat16))
    scores = kernels.logits(x, weight)
    assert (scores[1] == inf).all()
    assert (scores[3] == -inf).all()
    assert scores[5].isnan().all()  # infinities of both signs
    assert scores[8].isnan().all()
    assert scores[[0, 2, 4, 6, 7]].isfinite().all()
    assert (kernels.logits(x, weight, 1.0, 30.0)[[1, 3]].abs() == 30).all()
    assert kernels.linear(x, weight)[8].isnan().all()
    most = torch.finfo(torch.bfloat16).max
    assert (kernels.linear(torch.full((1, 37), most, dtype=torch.bfloat16), weight) == inf).all()


@pytest.mark.parametrize("level", sorted({"avx512", "avx2", "generic"} & set(available_levels())))
def test_bfloat16_numbers_below_the_normal_range_count(level: str, two_threads: Callable[..., None]) -> None:
    """Instructions for bfloat16 take them for zero; multiplications in float32 do not."""
    two_threads(level)
    tiny = torch.full((3, 32), 2.0**-130, dtype=torch.bfloat16)
    weight = kernels.pack_weight(torch.full((20, 32), 2.0, dtype=torch.bfloat16))
    assert (kernels.logits(tiny, weight) == 2.0**-124).all()


def test_a_weight_is_read_only_as_it_was_packed(two_threads: Callable[..., None]) -> None:
    two_threads("generic")
    x, weight = random(3, 8), random(6, 8, seed=1)
    with pytest.raises(ValueError, match="gated=True, expected gated=False"):
        kernels.linear(x, kernels.pack_weight(weight, gated=True))
    with pytest.raises(ValueError, match="gated=False, expected gated=True"):
        kernels.gated_linear(x, kernels.pack_weight(weight), None, "silu")
    with pytest.raises(ValueError, match="two halves, got 5 outputs"):
        kernels.pack_weight(weight[:5], gated=True)


def test_dot_products_of_bfloat16_are_preferred_where_they_are_fast() -> None:
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    order = ["avx512_bf16", "avx512_vnni"] if amd else ["avx512_vnni", "avx512_bf16"]
    found = [level for level in available_levels() if level in order]
    assert found == [level for level in order if level in found]
