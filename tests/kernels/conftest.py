"""Random batches over a paged KV cache whose unwritten places are NaN."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels import AttentionMetadata, reshape_and_cache
from octavo.kernels.kv_rows import FACTOR_BYTES, keep_rows, widen_rows
from tests.kernels import amx

# The level's other kernels are compiled for AVX-512, and so is the emulator.
collect_ignore = [] if amx.available() else ["test_amx_emulator.py", "test_amx_level.py", "test_coded_weights.py"]
collect_ignore += [] if amx.has_halves() else ["test_quantized_as_bfloat16.py"]


def _native_levels() -> list[str]:
    return [] if find_spec("octavo._native") is None else amx.native_levels()


def _levels() -> list[str]:
    """Everything that computes the ops on this machine in its own way: avx512_vnni shares all kernels with avx512 but
    those of quantized weights."""
    return ["torch", *(name for name in _native_levels() if name != "avx512_vnni")]


@pytest.fixture(scope="module", params=_levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The tests of a module that asks for it run once with the definitions and once on each level."""
    with _chosen(request.param):
        yield request.param


@pytest.fixture(scope="module", params=_native_levels())
def native_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Likewise, without the definitions: for what only kernels do."""
    with _chosen(request.param):
        yield request.param


@pytest.fixture
def amx_level(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Level amx and two threads, whatever the machine."""
    monkeypatch.setenv("OCTAVO_CPU_ISA", "amx")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    with amx.level("amx"):
        kernels.select("native")
        yield
        kernels.select("torch")


@contextmanager
def _chosen(level: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, amx.level(level):
        patch.setenv("OCTAVO_CPU_ISA", level)
        kernels.select("torch" if level == "torch" else "native")
        yield
        kernels.select("torch")


@dataclass
class Batch:
    """Attributes:

    query: the step's queries.
    keys, values: for each request [seq_len, num_kv_heads, head_size], as the cache keeps them.
    """

    query: Tensor
    kv_cache: Tensor
    metadata: AttentionMetadata
    keys: list[Tensor]
    values: list[Tensor]


MakeBatch = Callable[..., Batch]


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """``make_batch([(query_len, seq_len), …], …)``: blocks in random order; blocks that a sliding window has left
    behind are block 0, which like every unwritten place is full of NaN. ``kept``: a data type of 8 bits."""

    def make(
        lengths: list[tuple[int, int]],
        num_kv_heads: int = 2,
        shared: int = 3,
        head_size: int = 16,
        block_size: int = 16,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        kept: torch.dtype | None = None,
    ) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-seq_len // block_size) for _, seq_len in lengths]
        order = (torch.randperm(sum(counts), generator=generator) + 1).int()
        shape = (sum(counts) + 1, 2, block_size, num_kv_heads, head_size)
        kv_cache = torch.full(shape, float("nan"), dtype=dtype)
        if kept is not None:  # all bits set: a factor that is NaN
            kv_cache = torch.full((*shape[:-1], head_size + FACTOR_BYTES), 0xFF, dtype=torch.uint8).view(kept)
        table = torch.zeros(len(lengths), max(counts) + 2, dtype=torch.int32)
        keys, values, slots = [], [], []
        for index, (query_len, seq_len) in enumerate(lengths):
            blocks, order = order[: counts[index]], order[counts[index] :]
            table[index, : counts[index]] = blocks
            positions = torch.arange(seq_len)
            slot = blocks[positions // block_size].long() * block_size + positions % block_size
            key, value = torch.randn(2, seq_len, num_kv_heads, head_size, generator=generator).to(dtype)
            first = seq_len - query_len
            oldest = 0 if window is None else max(0, first - window + 1)
            table[index, : oldest // block_size] = 0
            reshape_and_cache(key[oldest:first], value[oldest:first], kv_cache, slot[oldest:first])
            keys.append(key)
            values.append(value)
            slots.append(slot[first:])
        starts = torch.tensor([0, *[query_len for query_len, _ in lengths]]).cumsum(0).int()
        metadata = AttentionMetadata(
            query_start_loc=starts,
            seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32),
            block_table=table,
            slot_mapping=torch.cat(slots),
            max_query_len=max(query_len for query_len, _ in lengths),
            max_seq_len=max(seq_len for _, seq_len in lengths),
        )
        new_keys = torch.cat([key[seq_len - q :] for key, (q, seq_len) in zip(keys, lengths, strict=True)])
        new_values = torch.cat([value[seq_len - q :] for value, (q, seq_len) in zip(values, lengths, strict=True)])
        reshape_and_cache(new_keys, new_values, kv_cache, metadata.slot_mapping)
        if kept is not None:
            keys, values = ([widen_rows(keep_rows(x, kept)) for x in found] for found in (keys, values))
        num_heads = num_kv_heads * shared
        query = torch.randn(int(starts[-1]), num_heads, head_size, generator=generator).to(dtype)
        return Batch(query, kv_cache, metadata, keys, values)

    return make
