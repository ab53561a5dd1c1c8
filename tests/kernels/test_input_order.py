"""Quantized matrices whose columns are in an order of their own (act-order): products are, to the bit, those of the
same columns with x put into that order, for every op that takes such a weight, eager and replayed."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import kernels
from tests.kernels.quantized_blocks import Weight, block_values, draw

pytestmark = pytest.mark.usefixtures("native_level")

TYPES = ["U4:32", "U4:128", "U8:64", "Q4_K"]
# One row, few, and enough that threads take blocks of them.
COUNTS = [1, 3, 33, 600]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def orders(in_size: int, seed: int = 0) -> Tensor:
    return torch.randperm(in_size, generator=torch.Generator().manual_seed(seed)).int()


def packed(
    type_name: str, weight: Weight, order: Tensor | None, gated: bool = False, dtype: torch.dtype = torch.bfloat16
) -> kernels.Weight:
    out_size, in_size = weight.q.shape
    return kernels.pack_blocks(type_name, weight.data, (out_size, in_size), dtype, gated, order)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("type_name", TYPES)
def test_products_are_those_of_inputs_in_that_order(type_name: str, dtype: torch.dtype) -> None:
    in_size = 3 * block_values(type_name)
    order, columns = orders(in_size), orders(in_size).long()
    weight = draw(type_name, 40, in_size)
    products: list[tuple[bool, Callable[[Tensor, kernels.Weight], Tensor]]] = [
        (False, lambda x, w: kernels.linear(x, w, random(40, dtype=dtype))),
        (False, lambda x, w: kernels.logits(x, w, 0.5, 30.0)),
        (False, lambda x, w: kernels.linear_add(x, w, None, random(len(x), 40, dtype=torch.float32), 0.5)),
        (True, lambda x, w: kernels.gated_linear(x, w, None, "silu")),
    ]
    for gated, product in products:
        ordered, plain = (packed(type_name, weight, each, gated, dtype) for each in (order, None))
        for count in COUNTS:
            # Rows with a distance that is not their length.
            x = random(count, in_size + 16, seed=count, dtype=dtype)[:, :in_size]
            assert torch.equal(product(x, ordered), product(x[:, columns], plain))
            assert not torch.equal(product(x, ordered), product(x, plain))  # control: the order matters
        assert product(random(0, in_size, dtype=dtype), ordered).shape[0] == 0


def test_parts_of_a_merged_weight_have_orders_of_their_own() -> None:
    weights = [draw("U4:32", rows, 96, seed=rows) for rows in (48, 16, 32)]
    found: list[kernels.PackedWeight] = []
    expected: list[kernels.PackedWeight] = []
    for seed, weight in enumerate(weights):
        for into, order in ((found, orders(96, seed) if seed else None), (expected, None)):
            each = packed("U4:32", weight, order)
            assert isinstance(each, kernels.PackedWeight)
            into.append(each)
    x, bias = random(5, 96), random(96, seed=1)
    parts = [
        kernels.linear(x[:, orders(96, seed).long()] if seed else x, weight, bias[start : start + weight.shape[0]])
        for seed, (start, weight) in enumerate(zip((0, 48, 64), expected, strict=True))
    ]
    assert torch.equal(kernels.linear(x, kernels.MergedWeight(tuple(found)), bias), torch.cat(parts, dim=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_a_table_come_with_their_columns_in_order(dtype: torch.dtype) -> None:
    weight, order, ids = draw("U8:64", 50, 192), orders(192), torch.tensor([3, 49, 0, 3])
    found = kernels.embedding(ids, packed("U8:64", weight, order), 2.0, dtype)
    plain = kernels.embedding(ids, packed("U8:64", weight, None), 2.0, dtype)
    assert torch.equal(found[:, order.long()], plain)
    assert not torch.equal(found, plain)


def test_replayed_in_one_call_with_the_same_bits() -> None:
    """Also where a thread takes a block of rows through several products."""
    up, down = draw("U4:32", 160, 96), draw("U4:32", 96, 160, seed=1)
    first, second = packed("U4:32", up, orders(96)), packed("U4:32", down, orders(160))
    x, norm = random(600, 96), random(96, seed=2)

    def forward(rows: int) -> Tensor:
        residual = kernels.cast(x[:rows], torch.float32)
        for _ in range(2):
            inner = kernels.linear(kernels.rms_norm(residual, norm, 1e-5, torch.bfloat16), first)
            residual = kernels.linear_add(inner, second, None, residual)
        return residual

    recorded = kernels.record_forward(forward, (x,), 600)
    assert recorded.mode == "FULL"
    for rows in (1, 7, 300, 600):
        x.copy_(random(600, 96, seed=rows))
        assert torch.equal(recorded.run(rows, 1), forward(rows))


def test_what_is_no_order_is_refused() -> None:
    weight = draw("U4:32", 16, 64)
    for wrong, why in (
        (torch.zeros(64, dtype=torch.int32), "does not have each input once"),
        (torch.arange(1, 65, dtype=torch.int32), "does not have each input once"),
        (torch.arange(63, dtype=torch.int32), r"input_order is torch.int32 \(63,\), expected torch.int32 \(64,\)"),
        (torch.arange(64), "input_order is torch.int64"),
    ):
        with pytest.raises(ValueError, match=why):
            packed("U4:32", weight, wrong)
    with pytest.raises(ValueError, match="only quantized weights"):
        kernels.empty_weight((16, 64), torch.bfloat16, input_order=orders(64))


def test_the_library_refuses_columns_that_are_not_there() -> None:
    from octavo import _native

    x, out = random(2, 4, dtype=torch.float32), torch.zeros(2, 4)
    for wrong in ([0, 1, 2, 4], [0, -1, 2, 3]):
        order = np.array(wrong, np.int32)
        for back in (False, True):
            with pytest.raises(IndexError, match="columns must be below 4"):
                _native.reorder(0, x.data_ptr(), 4, order.ctypes.data, back, out.data_ptr(), 2, 4)
    assert not out.any()
