"""Products with AMX tiles: their sums bit for bit as the instructions' definition makes them in numpy, nothing read
that is not a row's or a block's own, no tile kept, and no instruction where there is no AMX."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.native import available_levels
from tests.kernels import amx
from tests.kernels.quantized_blocks import TYPES, draw
from tests.kernels.test_amx_emulator import dot_bf16

pytestmark = pytest.mark.usefixtures("amx_level")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bits(x: Tensor) -> Any:
    return x.view(torch.uint16).numpy()


def defined(x: Tensor, weight: Tensor, step: int = 32) -> Tensor:
    """One sum for each output, ``step`` inputs at a time in ascending order."""
    size = -(-x.shape[1] // step) * step
    left, right = np.zeros((len(x), size), np.uint16), np.zeros((len(weight), size), np.uint16)
    left[:, : x.shape[1]], right[:, : x.shape[1]] = bits(x), bits(weight)
    total = np.zeros((len(x), len(weight)), np.float32)
    for k in range(0, size, step):
        pairs = right[:, k : k + step].reshape(len(weight), step // 2, 2).transpose(1, 0, 2).reshape(step // 2, -1)
        total = dot_bf16(left[:, k : k + step], pairs, total)
    return torch.from_numpy(total)


# Rows: one tile, two, several pairs and a rest, more than the cache holds at once (1,024 × 1,184 inputs: two times).
# Inputs: parts of a step, an odd number, more steps than one part of a pass. Outputs: panels of two and of four blocks.
@pytest.mark.parametrize(
    ("rows", "inner", "outer"),
    [
        (1, 32, 16),
        (1, 7, 1),
        (2, 1, 65),
        (5, 577, 130),
        (16, 64, 49),
        (17, 33, 48),
        (32, 95, 33),
        (33, 416, 17),
        (50, 1000, 40),
        (100, 31, 100),
        (1024, 1184, 2),
    ],
)
def test_each_output_is_one_sum_in_ascending_order(rows: int, inner: int, outer: int) -> None:
    x, weight = random(rows, inner), random(outer, inner, seed=1)
    found = kernels.logits(x, kernels.pack_weight(weight))
    some = sorted({0, rows // 2, rows - 1} | set(range(min(rows, 40))))
    assert torch.equal(found[some], defined(x[some], weight))


def test_control_another_order_has_other_bits() -> None:
    x, weight = random(3, 640), random(16, 640, seed=1)
    found = kernels.logits(x, kernels.pack_weight(weight))
    assert torch.equal(found, defined(x, weight))
    assert not torch.equal(found, defined(x, weight, step=16))
    assert not torch.equal(found, defined(x[:, :320], weight[:, :320]) + defined(x[:, 320:], weight[:, 320:]))


@pytest.mark.parametrize("rows", [1, 16, 20, 70])
@pytest.mark.parametrize("inner", [33, 48, 100])
def test_neighbours_in_memory_are_not_read(rows: int, inner: int) -> None:
    """0 × NaN: beyond a row's inputs and a block's lines there may be anything."""
    wide = torch.full((rows, inner + 64), float("nan"), dtype=torch.bfloat16)
    x, weight = wide[:, :inner], random(96, inner, seed=1)
    x.copy_(random(rows, inner))
    expected = kernels.logits(x.clone(), kernels.pack_weight(weight))
    for block in range(0, 96, 16):
        bad = weight.clone()
        bad[block : block + 16] = float("nan")
        found = kernels.logits(x, kernels.pack_weight(bad))
        assert found[:, block : block + 16].isnan().all()
        found[:, block : block + 16] = expected[:, block : block + 16]
        assert torch.equal(found, expected)


def test_a_row_that_is_no_number_leaves_the_others_alone() -> None:
    x, weight = random(40, 80), kernels.pack_weight(random(64, 80, seed=1))
    expected = kernels.logits(x, weight)
    for row in (0, 15, 16, 39):
        bad = x.clone()
        bad[row] = float("inf")
        found = kernels.logits(bad, weight)
        assert not found[row].isfinite().any()
        found[row] = expected[row]
        assert torch.equal(found, expected)


@pytest.mark.parametrize("type_name", TYPES)
def test_quantized_weights_give_the_bits_that_vectors_give(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = draw(type_name, 96, 768), random(70, 768)
    kept = kernels.pack_blocks(type_name, weight.data, (96, 768), torch.bfloat16)
    gated = kernels.pack_blocks(type_name, weight.data, (96, 768), torch.bfloat16, gated=True)

    def results() -> list[Tensor]:
        return [kernels.logits(x[:count], kept) for count in (1, 31, 32, 33, 70)]

    found = results()
    # Of up to 31 rows the level has the products of vectors, too; its gates are its own.
    few = torch.cat([kernels.gated_linear(part.contiguous(), gated, None, "silu") for part in x.split(31)])
    assert torch.equal(kernels.gated_linear(x, gated, None, "silu"), few)
    monkeypatch.setenv("OCTAVO_CPU_ISA", "avx512_vnni")
    kernels.select("native")
    assert all(torch.equal(a, b) for a, b in zip(found, results(), strict=True))


def test_level_amx_is_offered_where_its_instructions_run() -> None:
    assert available_levels()[0] == "amx"
    command = [
        sys.executable,
        "-c",
        "from octavo import kernels; kernels.select('native'); print(kernels.kernel_set())",
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=amx.HERE.parents[2], env={**os.environ, "OCTAVO_CPU_ISA": "amx"}
    )
    if amx.native():
        assert run.stdout == "native-amx\n"
    else:  # nothing emulates them there
        assert "ConfigError: OCTAVO_CPU_ISA='amx': this machine can run avx512" in run.stderr


if not amx.native():

    def counted(rows: int, inner: int, outer: int) -> dict[str, int]:
        x, weight = random(rows, inner), kernels.pack_weight(random(outer, inner))
        before = amx.executed()
        kernels.linear(x, weight)
        return {name: count - before[name] for name, count in amx.executed().items()}

    def test_products_of_quantized_weights_are_made_of_tiles_where_rows_are_many() -> None:
        kept = kernels.pack_blocks("Q4_0", draw("Q4_0", 48, 96).data, (48, 96), torch.bfloat16)
        for rows, made in ((31, False), (32, True)):
            before = amx.executed()
            kernels.linear(random(rows, 96), kept)
            count = {name: number - before[name] for name, number in amx.executed().items()}
            assert (count["tdp"] > 0) == made
            assert count["ldtilecfg"] == count["tilerelease"]
        assert amx.emulator().octavo_amx_configured_threads() == 0

    def test_no_thread_keeps_its_tiles() -> None:
        count = counted(40, 64, 320)
        assert count["ldtilecfg"] == count["tilerelease"] > 0
        assert amx.emulator().octavo_amx_configured_threads() == 0

    @pytest.mark.parametrize(
        ("rows", "inner", "outer", "loads"),
        [
            (1, 576, 64, 18 * (1 + 4)),  # x once for four blocks
            (
                32,
                576,
                64,
                2 * 18 * (2 + 2) + 2 * 4,
            ),  # two tiles of rows, two blocks; the sums once more for a second part
            (64, 576, 64, 4 * 18 * (4 + 1) + 2 * 4 * 4),  # four tiles of rows, each block alone, and three parts
        ],
    )
    def test_tiles_are_loaded_no_more_often_than_the_sums_at_hand_need(
        rows: int, inner: int, outer: int, loads: int
    ) -> None:
        count = counted(rows, inner, outer)
        assert count["tdp"] == -(-rows // 16) * (outer // 16) * (inner // 32)
        assert count["tileload"] == loads
