"""Packed weights: the layout of csrc/cpu/kernels.hpp, made of rows as they come, in memory of their own."""

import gc
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.platforms import current_platform

if current_platform().kernel_provider != "native":
    pytest.skip("the native kernels were not built", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    kernels.select("native")
    yield
    kernels.select("torch")


def laid_out(weight: Tensor) -> bytes:
    """The drawing at Linear, written with numpy: blocks of 16 outputs, transposed by 4-byte units."""
    together = 4 // weight.itemsize
    out_size, in_size = weight.shape
    padded = torch.zeros(-(-out_size // 16) * 16, -(-in_size // together) * together, dtype=weight.dtype)
    padded[:out_size, :in_size] = weight
    units = padded.view(torch.uint8).numpy().view(np.uint32)
    return units.reshape(len(padded) // 16, 16, -1).transpose(0, 2, 1).tobytes()


def packed_bytes(weight: kernels.Weight) -> bytes:
    assert isinstance(weight, kernels.PackedWeight)
    return weight.data.numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_size", "in_size"), [(1, 1), (16, 32), (17, 33), (40, 100), (300, 7)])
def test_rows_in_any_parts_and_order_give_the_drawn_layout(dtype: torch.dtype, out_size: int, in_size: int) -> None:
    whole = torch.randn(out_size, in_size, generator=torch.Generator().manual_seed(out_size)).to(dtype)
    packed = kernels.empty_weight((out_size, in_size), dtype)
    starts = sorted({0, 1, 15, 16, 19, out_size // 2, out_size} & set(range(out_size + 1)))
    for first, last in reversed(list(itertools.pairwise(starts))):
        kernels.fill_rows(packed, first, whole[first:last])
    assert packed_bytes(packed) == laid_out(whole)
    assert packed_bytes(kernels.filled(packed)) == packed_bytes(kernels.pack_weight(whole))
    assert out_size * in_size == 1 or packed_bytes(packed) != laid_out(whole.flip(0, 1))  # control


def test_gates_lie_beside_what_they_belong_to_in_whatever_parts_they_come() -> None:
    whole = torch.randn(2 * 40, 33).bfloat16()
    packed = kernels.empty_weight((80, 33), torch.bfloat16, gated=True)
    for first, last in ((38, 80), (0, 17), (17, 38)):
        kernels.fill_rows(packed, first, whole[first:last])
    gate, up = (np.frombuffer(laid_out(half), np.uint8).reshape(3, -1) for half in whole.split(40))
    assert packed_bytes(packed) == np.stack([gate, up], axis=1).tobytes()
    assert packed_bytes(kernels.filled(packed)) != packed_bytes(kernels.pack_weight(whole))  # control


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", DTYPES)
def test_rows_are_rounded_as_torch_rounds(source: torch.dtype, target: torch.dtype) -> None:
    whole = torch.randn(700, 501, generator=torch.Generator().manual_seed(1)).to(source)  # several pieces
    packed = kernels.empty_weight((700, 501), target)
    kernels.fill_rows(packed, 0, whole)
    assert packed_bytes(packed) == laid_out(whole.to(target))


def test_rows_need_not_be_aligned() -> None:
    """In a safetensors file they may lie anywhere."""
    raw = torch.zeros(1 + 20 * 37 * 4, dtype=torch.uint8)
    rows = torch.from_numpy(raw.numpy()[1:]).view(torch.float32).view(20, 37)
    rows[:] = torch.randn(20, 37)
    assert rows.data_ptr() % 4 == 1
    assert packed_bytes(kernels.pack_weight(rows)) == laid_out(rows)


def test_threads_may_fill_lanes_of_the_same_block_at_once() -> None:
    whole = torch.randn(1000, 512).bfloat16()
    packed = kernels.empty_weight((1000, 512), torch.bfloat16)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda row: kernels.fill_rows(packed, row, whole[row : row + 5]), range(0, 1000, 5)))
    assert packed_bytes(packed) == laid_out(whole)


@pytest.mark.parametrize(("first", "shape"), [(-1, (2, 8)), (9, (2, 8)), (0, (11, 8)), (0, (2, 7))])
def test_rows_that_do_not_fit_are_refused(first: int, shape: tuple[int, int]) -> None:
    packed = kernels.empty_weight((10, 8), torch.float32)
    before = packed_bytes(packed)
    with pytest.raises(ValueError, match="do not fit into a weight"):
        kernels.fill_rows(packed, first, torch.ones(shape))
    assert packed_bytes(packed) == before


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K"])
def test_blocks_of_any_bytes_have_the_same_bits_as_their_definition(name: str) -> None:
    block_bytes = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q6_K": 210}[name]
    # Every float16 is a scale once: denormal, infinite and not a number, too.
    data = np.random.default_rng(7).integers(0, 256, (1 << 16, block_bytes), dtype=np.uint8)
    data[:, :2] = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    got = kernels.dequantize(name, data.reshape(-1))
    expected = kernels.dequantize.definition(name, data.reshape(-1))
    assert torch.equal(got.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(got[numbers].view(torch.int32), expected[numbers].view(torch.int32))
    assert 0 < numbers.sum() < len(numbers) or name == "Q6_K"
    assert kernels.dequantize.provider == "native"


def test_half_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="35 bytes of Q8_0 are not whole blocks of 34"):
        kernels.dequantize("Q8_0", np.zeros(35, np.uint8))


def test_weights_lie_beside_each_other_and_their_memory_goes_with_the_last() -> None:
    def mapped() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * 4096

    gc.collect()
    before = mapped()
    weights = [kernels.empty_weight((1000, 1000), torch.float32) for _ in range(3)]
    addresses = sorted(weight.data.data_ptr() for weight in weights if isinstance(weight, kernels.PackedWeight))
    assert len(addresses) == 3
    assert all(address % 64 == 0 for address in addresses)
    assert all(b - a < 4_100_000 for a, b in itertools.pairwise(addresses))
    assert mapped() > before
    del weights
    gc.collect()
    assert mapped() <= before
