"""What native kernels promise beyond the ops' definitions: the same bits whatever the rows beside a row and however
many threads, and never an instruction that the machine lacks."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo import kernels
from octavo.errors import ConfigError
from tests.kernels import amx

MakeBatch = Callable[..., Any]

few = settings(max_examples=30, deadline=None, derandomize=True)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
KEPT = [None, torch.int8, torch.float8_e4m3fn]  # by the KV cache; None: what comes


@pytest.fixture(scope="module", params=amx.native_levels(), autouse=True)
def native_level(request: pytest.FixtureRequest) -> Iterator[Callable[[int], None]]:
    """Calling it chooses the number of threads."""
    with pytest.MonkeyPatch.context() as patch, amx.level(request.param):
        patch.setenv("OCTAVO_CPU_ISA", request.param)

        def use_threads(count: int) -> None:
            patch.setenv("OMP_NUM_THREADS", str(count))
            patch.setattr("os.sched_getaffinity", lambda pid: set(range(count)))
            kernels.select("native")

        use_threads(2)
        yield use_threads
        kernels.select("torch")


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@few
@given(
    num_rows=st.sampled_from([1, 2, 5, 6, 7, 31, 32, 33, 300]),
    inner=st.integers(1, 200),
    outer=st.sampled_from([1, 15, 16, 17, 63, 64, 65, 200]),
    dtype=dtypes,
)
def test_a_row_has_the_same_bits_alone_and_among_others(
    num_rows: int, inner: int, outer: int, dtype: torch.dtype
) -> None:
    x, bias = random(num_rows, inner, dtype=dtype), random(outer, dtype=dtype, seed=2)
    weight = kernels.pack_weight(random(outer, inner, dtype=dtype, seed=1))
    together, scores, capped = (
        kernels.linear(x, weight, bias),
        kernels.logits(x, weight),
        kernels.logits(x, weight, 3.0, 5.0),
    )
    for row in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(kernels.linear(x[row : row + 1], weight, bias)[0], together[row])
        assert torch.equal(kernels.logits(x[row : row + 1], weight)[0], scores[row])
        assert torch.equal(kernels.logits(x[row : row + 1], weight, 3.0, 5.0)[0], capped[row])


@few
@given(num_rows=st.sampled_from([2, 33, 700]), width=st.integers(1, 100), dtype=dtypes, to=dtypes)
def test_row_wise_kernels_give_a_row_the_same_bits_alone_and_among_others(
    num_rows: int, width: int, dtype: torch.dtype, to: torch.dtype
) -> None:
    wide, weight = random(num_rows, 3, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    residual = random(num_rows, width, dtype=torch.float32, seed=2)
    table = kernels.pack_weight(random(20, width, dtype=dtype, seed=3))

    def everything(rows: slice) -> list[Tensor]:
        heads = wide[rows]
        x, ids = heads[:, 1], torch.arange(num_rows)[rows] % 20
        return [
            kernels.rms_norm(x, weight, 1e-5, to),
            kernels.rms_norm(heads, weight, 1e-5, to),
            kernels.layer_norm(x, weight, weight, 1e-5, to),
            kernels.rms_norm_add(x, weight, 1e-5, residual[rows].clone()),
            kernels.cast(x, to),
            kernels.gelu(x),
            kernels.embedding(ids, table, 0.3, to),
        ]

    together = everything(slice(None))
    for row in {0, num_rows // 2, num_rows - 1}:
        for alone, among in zip(everything(slice(row, row + 1)), together, strict=True):
            assert torch.equal(alone[0], among[row])


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_writes_the_same_bits_row_by_row_and_all_together(dtype: torch.dtype, kept: torch.dtype | None) -> None:
    wide, table = random(300, 4, 80, dtype=dtype), random(300, 48, dtype=torch.float32, seed=1)
    positions, slots = torch.arange(300), torch.arange(300) * 7 % 400

    def rotated(cache: Tensor, rows: slice) -> Tensor:
        query, key, value = wide[rows].split([2, 1, 1], dim=1)
        return kernels.rotary_and_cache(positions[rows], query, key, value, table, cache, slots[rows])

    one, other = torch.zeros(2, 25, 2, 16, 1, 80 if kept is None else 84, dtype=kept or dtype)
    assert torch.equal(rotated(one, slice(None)), torch.cat([rotated(other, slice(i, i + 1)) for i in range(300)]))
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_one_thread_and_two_give_the_same_bits(native_level: Callable[[int], None], make_batch: MakeBatch) -> None:
    def everything() -> list[Tensor]:
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            x = random(65, 208, dtype=dtype)
            weight = kernels.pack_weight(random(1000, 208, dtype=dtype, seed=1))
            found += [kernels.linear(x, weight), kernels.logits(x[:1], weight)]
            # Enough rows for several pieces.
            many, residual = random(300, 208, dtype=dtype), random(300, 208, dtype=torch.float32, seed=2)
            found += [kernels.gelu(many), kernels.gelu(many, "tanh")]
            found += [kernels.rms_norm(many, x[0], 1e-5), kernels.layer_norm(many, x[0], x[1], 1e-5)]
            found += [kernels.rms_norm_add(many, x[0], 1e-5, residual.clone()), kernels.cast(many, torch.bfloat16)]
            found += [kernels.embedding(torch.arange(300), kernels.pack_weight(many), 3.0)]
            # Few rows with a long context (partitions are shared out), and many (rows are).
            for lengths, kept in itertools.product(([(1, 1500)], [(40, 700), (1, 300), (1, 9)]), KEPT):
                batch = make_batch(lengths, dtype=dtype, num_kv_heads=1, kept=kept)
                found.append(kernels.paged_attention(batch.query, batch.kv_cache, batch.metadata, 0.3, None))
        return found

    native_level(1)
    one = everything()
    native_level(2)
    two = everything()
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kept", "block_size"), [*itertools.product(KEPT, (16, 12)), (None, 1), (None, 128)])
def test_a_prompt_has_the_same_bits_whole_and_in_pieces(
    make_batch: MakeBatch, dtype: torch.dtype, window: int | None, kept: torch.dtype | None, block_size: int
) -> None:
    batch = make_batch([(700, 700)], dtype=dtype, window=window, kept=kept, block_size=block_size)
    whole = kernels.paged_attention(batch.query, batch.kv_cache, batch.metadata, 0.3, window)
    for first, size in ((0, 17), (255, 2), (400, 100), (699, 1)):
        metadata = kernels.AttentionMetadata(
            query_start_loc=torch.tensor([0, size], dtype=torch.int32),
            seq_lens=torch.tensor([first + size], dtype=torch.int32),
            block_table=batch.metadata.block_table,
            slot_mapping=batch.metadata.slot_mapping[first : first + size],
            max_query_len=size,
            max_seq_len=first + size,
        )
        rows = slice(first, first + size)
        piece = kernels.paged_attention(batch.query[rows], batch.kv_cache, metadata, 0.3, window)
        assert torch.equal(piece, whole[rows])


@pytest.mark.parametrize("head_size", [16, 64, 80, 128])
@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("kept", KEPT)
def test_what_is_not_finite_changes_no_row_that_does_not_see_it(
    make_batch: MakeBatch, head_size: int, what: str, number: float, window: int | None, kept: torch.dtype | None
) -> None:
    batch = make_batch([(90, 400)], dtype=torch.bfloat16, head_size=head_size, num_kv_heads=1, kept=kept)
    finite = kernels.paged_attention(batch.query, batch.kv_cache, batch.metadata, 0.3, window)
    position = 350
    slot = batch.metadata.block_table[0, position // 16] * 16 + position % 16
    key, value = (each[0][position : position + 1].to(torch.bfloat16) for each in (batch.keys, batch.values))
    key, value = key.clone(), value.clone()
    (key if what == "key" else value)[..., 3] = number
    kernels.reshape_and_cache(key, value, batch.kv_cache, slot.reshape(1).long())
    got = kernels.paged_attention(batch.query, batch.kv_cache, batch.metadata, 0.3, window)
    rows = torch.arange(310, 400)
    sees = (rows >= position) & (rows < position + (window or 400))
    assert torch.equal(got[~sees], finite[~sees])
    assert not got[sees].isfinite().all()  # the control: it was there to be seen


def test_control_another_order_of_the_sum_has_other_bits() -> None:
    x, weight = random(3, 4096, dtype=torch.float32), random(16, 4096, dtype=torch.float32, seed=1)
    halves = kernels.linear(x[:, :2048], weight[:, :2048]) + kernels.linear(x[:, 2048:], weight[:, 2048:])
    assert not torch.equal(kernels.linear(x, weight), halves)


def test_nothing_to_do_is_done(make_batch: MakeBatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        nothing = torch.empty(0, 32, dtype=dtype)
        assert kernels.linear(nothing, random(7, 32, dtype=dtype)).shape == (0, 7)
        assert kernels.rms_norm(nothing, random(32, dtype=dtype), 1e-5).shape == (0, 32)


def test_the_threads_sleep_between_steps() -> None:
    x, weight = random(1, 512, dtype=torch.bfloat16), random(4096, 512, dtype=torch.bfloat16, seed=1)
    kernels.linear(x, kernels.pack_weight(weight))
    time.sleep(0.05)  # they stay awake for half a millisecond
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


@pytest.mark.parametrize("asked", ["sse9", "amx-turbo", "AVX2"])
def test_an_unknown_level_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    chosen = kernels.kernel_set()
    monkeypatch.setenv("OCTAVO_CPU_ISA", asked)
    with pytest.raises(ConfigError, match=f"OCTAVO_CPU_ISA='{asked}'.*generic"):
        kernels.select("native")
    assert kernels.kernel_set() == chosen


def test_the_level_is_part_of_the_kernel_sets_name() -> None:
    assert kernels.kernel_set() == f"native-{os.environ['OCTAVO_CPU_ISA']}"


def _without_the_module(level: str) -> "subprocess.CompletedProcess[str]":
    program = (
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'octavo._native' else found(name, *more)\n"
        "from octavo.platforms import current_platform\n"
        "print(current_platform().kernel_provider)\n"
    )
    environment = {**os.environ, "OCTAVO_CPU_ISA": level}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)


def test_without_the_module_octavo_computes_with_torch_and_says_so() -> None:
    run = _without_the_module("")
    assert run.stdout == "torch\n"
    assert "native kernels were not built" in run.stderr


def test_without_the_module_a_level_that_was_asked_for_is_refused() -> None:
    assert _without_the_module("torch").stdout == "torch\n"
    run = _without_the_module("generic")
    assert not run.stdout
    assert "ConfigError: OCTAVO_CPU_ISA='generic': the native kernels were not built" in run.stderr
