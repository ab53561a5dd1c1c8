"""Native kernels never leave their arrays: calls that would are refused before anything is read or written. And what
else a process does (flushed denormals, fork, other threads) changes nothing."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import _native, kernels
from octavo.errors import ConfigError
from tests.kernels import amx

MakeBatch = Callable[..., Any]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    kernels.select("native")
    yield
    kernels.select("torch")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attend(batch: Any, query: Tensor | None = None, window: int | None = None, **changes: Any) -> Tensor:
    metadata = replace(batch.metadata, **changes)
    return kernels.paged_attention(batch.query if query is None else query, batch.kv_cache, metadata, 0.3, window)


def rotate(batch: Any, x: Tensor, positions: Tensor, slots: Tensor, channels: int = 16) -> Tensor:
    table = random(7, channels)
    return kernels.rotary_and_cache(positions, x, x[:, :2], x[:, 2:4], table, batch.kv_cache, slots)


@pytest.mark.parametrize("wrong", [-1, 7])
def test_indices_beyond_their_arrays_are_refused(wrong: int, make_batch: MakeBatch) -> None:
    batch = make_batch([(3, 20), (1, 40)])  # 5 blocks and the null block
    heads, new = random(1, 6, 16), torch.tensor([wrong])
    with pytest.raises(IndexError, match="token ids must be below 7"):
        kernels.embedding(new, kernels.pack_weight(random(7, 8)))
    with pytest.raises(IndexError, match="positions must be below 7"):
        rotate(batch, heads, new, new * 0)
    with pytest.raises(IndexError, match="slots must be below 96"):
        rotate(batch, heads, new * 0, new * 16)
    with pytest.raises(IndexError, match="slots must be below 96"):
        kernels.reshape_and_cache(heads[:, :2], heads[:, :2], batch.kv_cache, new * 16)
    table = batch.metadata.block_table.clone()
    table[1, 2] = wrong
    with pytest.raises(IndexError, match="block ids must be below 6"):
        attend(batch, block_table=table)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": [20, 81]}, "longer than its row of the block table"),
        ({"seq_lens": [2, 40]}, "no more than their sequences have"),
        ({"query_start_loc": [0, 3, 5]}, "rows of requests must follow each other"),
        ({"query_start_loc": [1, 3, 4]}, "rows of requests must follow each other"),
        ({"query_start_loc": [0, 4, 3]}, "rows of requests must follow each other"),
        ({"query_start_loc": [0, 4]}, "block_table is torch.int32"),
    ],
)
def test_requests_that_do_not_fit_are_refused(
    changes: dict[str, list[int]], message: str, make_batch: MakeBatch
) -> None:
    batch = make_batch([(3, 20), (1, 40)])
    with pytest.raises((ValueError, IndexError), match=message):
        attend(batch, **{name: torch.tensor(values, dtype=torch.int32) for name, values in changes.items()})


@pytest.mark.parametrize("kept", [None, torch.int8])
@pytest.mark.parametrize("block_size", [16, 12, 3])
def test_blocks_that_no_row_looks_at_may_be_anything(
    make_batch: MakeBatch, kept: torch.dtype | None, block_size: int
) -> None:
    batch = make_batch([(3, 60)], window=20, kept=kept, block_size=block_size)
    expected = attend(batch, window=20)
    table = batch.metadata.block_table.clone()
    table[0, : 38 // block_size] = 10**6  # the first row looks at 38 to 57
    table[0, 38 // block_size - 1] = -5
    table[0, -(-60 // block_size) :] = 10**6
    assert torch.equal(attend(batch, window=20, block_table=table), expected)
    with pytest.raises(IndexError):
        attend(batch, block_table=table)


def test_rows_of_no_request_are_zero(make_batch: MakeBatch) -> None:
    batch = make_batch([(3, 20)])
    output = attend(batch, torch.cat([batch.query, random(4, 6, 16)]))
    assert torch.equal(output[:3], attend(batch))
    assert (output[3:] == 0).all()


def test_tensors_of_other_types_and_sizes_are_refused(make_batch: MakeBatch) -> None:
    batch, kept = make_batch([(3, 20)]), make_batch([(3, 20)], kept=torch.int8)
    x, narrow = random(3, 16), random(3, 16, dtype=torch.bfloat16)
    weight, wide = random(5, 16), random(3, 6, 16)
    slots, positions = batch.metadata.slot_mapping, torch.tensor([0, 1, 2])
    for wrong in (
        lambda: kernels.linear(narrow, weight),
        lambda: kernels.linear(x[:, :8], weight),
        lambda: kernels.linear(x, weight, random(4)),
        lambda: kernels.linear(x, weight, random(5, dtype=torch.bfloat16)),
        lambda: kernels.linear(x, weight, random(10)[::2]),
        lambda: kernels.rms_norm(x, random(8), 1e-5),
        lambda: kernels.layer_norm(wide, random(3, 16), None, 1e-5),  # three norms for six heads
        lambda: kernels.layer_norm(x, random(16), random(16, dtype=torch.bfloat16), 1e-5),
        lambda: kernels.rms_norm_add(x, x[0], 1e-5, narrow),
        lambda: kernels.rms_norm_add(x, x[0], 1e-5, x[:2]),
        lambda: rotate(batch, wide, positions[:2], slots),
        lambda: rotate(batch, wide, positions, slots[:2]),
        lambda: rotate(batch, wide, positions.int(), slots),
        lambda: rotate(batch, wide, positions, slots, channels=18),
        lambda: rotate(batch, wide.bfloat16(), positions, slots),
        lambda: rotate(batch, wide[:, :3], positions, slots),
        lambda: rotate(batch, wide[..., :8], positions, slots),
        lambda: kernels.reshape_and_cache(wide[:, :2], wide[:, :2].bfloat16(), batch.kv_cache, slots),
        lambda: kernels.reshape_and_cache(wide[:, :1], wide[:, :2], batch.kv_cache, slots),
        lambda: kernels.reshape_and_cache(wide[:, :2], wide[:, :2], batch.kv_cache, slots[:2]),
        lambda: kernels.reshape_and_cache(wide[:, :2], wide[:, :2], batch.kv_cache.transpose(0, 1), slots),
        lambda: kernels.reshape_and_cache(wide[:, :2], wide[:, :2].bfloat16(), kept.kv_cache, slots),
        lambda: kernels.reshape_and_cache(wide[:, :2], wide[:, :2], kept.kv_cache[..., :-4], slots),
        lambda: attend(replace(kept, kv_cache=kept.kv_cache[..., :-4].contiguous())),
        lambda: attend(batch, batch.query.bfloat16()),
        lambda: attend(batch, batch.query[:, :5]),  # of two KV heads
        lambda: attend(batch, batch.query[..., :8]),
        lambda: attend(batch, seq_lens=batch.metadata.seq_lens.long()),
        lambda: attend(batch, block_table=batch.metadata.block_table.long()),
    ):
        with pytest.raises(ValueError, match=r"expected|multiple of KV heads|the weight|not contiguous|more"):
            wrong()


@pytest.mark.parametrize("head_size", [1, 15, 255])
def test_odd_heads_are_refused_in_bfloat16_and_computed_in_float32(make_batch: MakeBatch, head_size: int) -> None:
    with pytest.raises(ValueError, match=f"heads of {head_size} channels"):
        make_batch([(3, 20)], head_size=head_size, dtype=torch.bfloat16)
    for settings in ({}, {"dtype": torch.bfloat16, "kept": torch.int8}):
        assert attend(make_batch([(3, 20)], head_size=head_size, **settings)).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("length", [6, 40])
def test_what_a_later_token_has_written_never_reaches_an_earlier_row(
    make_batch: MakeBatch, dtype: torch.dtype, bad: float, length: int
) -> None:
    batch = make_batch([(length, length)], num_kv_heads=1, shared=2, head_size=24, dtype=dtype)
    expected = attend(batch)
    key, value = batch.keys[0][-1:], torch.full_like(batch.values[0][-1:], bad)
    kernels.reshape_and_cache(key, value, batch.kv_cache, batch.metadata.slot_mapping[-1:])
    output = attend(batch)
    assert torch.equal(output[:-1], expected[:-1])
    assert not output[-1].isfinite().any()


def test_a_score_that_is_no_number_shows_with_a_sink_too(make_batch: MakeBatch) -> None:
    batch = make_batch([(1, 5)])
    query = torch.full_like(batch.query, float("nan"))
    output = kernels.paged_attention(query, batch.kv_cache, batch.metadata, 0.3, sinks=torch.zeros(6))
    assert output.isnan().all()


@pytest.fixture(params=amx.native_levels())
def each_level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with amx.level(request.param):
        monkeypatch.setenv("OCTAVO_CPU_ISA", request.param)
        kernels.select("native")
        yield
        kernels.select("torch")


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["key", "value"])
def test_a_number_that_is_none_poisons_who_looks_at_it_and_nobody_else(
    each_level: None, make_batch: MakeBatch, kept: torch.dtype, bad: float, where: str
) -> None:
    batch = make_batch([(6, 6), (1, 40)], kept=kept)
    expected = attend(batch)
    new = {"key": torch.ones(1, 2, 16), "value": torch.ones(1, 2, 16)}
    new[where][..., 3] = bad
    kernels.reshape_and_cache(new["key"], new["value"], batch.kv_cache, batch.metadata.slot_mapping[4:5])
    got = attend(batch)
    assert got[4:6].isnan().all()
    assert torch.equal(got[:4], expected[:4])
    assert torch.equal(got[6:], expected[6:])


def test_flushed_denormals_of_the_caller_change_nothing(each_level: None) -> None:
    """Or some rows would be computed by threads that flush, and others by threads that do not."""
    x, weight = random(100, 64) * 1e-38, random(100, 64, seed=1)
    expected, norms = kernels.linear(x, weight), kernels.rms_norm(x, weight[0], 1e-5)
    assert ((expected != 0) & (expected.abs() < 1.17e-38)).any()
    assert torch.set_flush_denormal(True)
    try:
        found = [(kernels.linear(x, weight), kernels.rms_norm(x, weight[0], 1e-5)) for _ in range(20)]
        assert (x[0, 0] * 1e-3).item() == 0  # the caller's own state is as it was
    finally:
        torch.set_flush_denormal(False)  # with it on, they would all compare equal
    for product, normed in found:
        assert torch.equal(product, expected)
        assert torch.equal(normed, norms)


def test_a_forked_child_has_threads_of_its_own() -> None:
    program = (
        "import os, torch\n"
        "os.sched_getaffinity = lambda pid: {0, 1}\n"
        "from octavo import kernels\n"
        "kernels.select('native')\n"
        "x, weight = torch.ones(40, 64), torch.ones(640, 64)\n"
        "expected = kernels.linear(x, weight)\n"
        "child = os.fork()\n"
        "same = all(torch.equal(kernels.linear(x, weight), expected) for _ in range(20))\n"
        "if not child: raise SystemExit(0 if same else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not same)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    assert subprocess.run([sys.executable, "-c", program], timeout=60, env=environment).returncode == 0


def test_kernels_are_chosen_while_another_thread_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(64, 64), kernels.pack_weight(random(640, 64, seed=1))
    expected, wrong, done = kernels.linear(x, weight), [], threading.Event()

    def compute() -> None:
        while not done.is_set():
            if not torch.equal(kernels.linear(x, weight), expected):
                wrong.append(1)

    thread = threading.Thread(target=compute)
    thread.start()
    for count in [1, 2, 3] * 10:
        monkeypatch.setenv("OMP_NUM_THREADS", str(count))
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, count=count: set(range(count)))
        kernels.select("native")
    done.set()
    thread.join()
    assert not wrong


def test_a_level_that_the_processor_has_and_the_system_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_native, "refused_levels", lambda: [("amx", "no registers for this process")])
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    kernels.select("native")
    assert "level amx, which this processor has, are not used: no registers for this process" in caplog.text
    monkeypatch.setattr(_native, "available_levels", lambda: ["generic"])
    monkeypatch.setenv("OCTAVO_CPU_ISA", "amx")
    with pytest.raises(ConfigError, match=r"this machine can run generic .*; amx: no registers for this process"):
        kernels.select("native")
