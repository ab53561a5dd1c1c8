"""What only the definitions of the attention ops show: the cache's layout, and which rows are computed together."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo import kernels

MakeBatch = Callable[..., Any]

DECODE, CHUNK, PROMPT = (1, 40), (5, 33), (21, 21)


@pytest.mark.parametrize("window", [None, 20])
def test_no_group_reads_an_unwritten_slot(make_batch: MakeBatch, window: int | None) -> None:
    batch = make_batch([DECODE, CHUNK, PROMPT, (1, 3), (1, 100)], window=window)
    written = ~batch.kv_cache[:, 0, :, 0, 0].isnan().flatten()
    rows = []
    for group in batch.metadata.row_groups(16, window):
        assert written[group.slots].all()
        rows += group.rows.flatten().tolist()
    assert sorted(rows) == list(range(len(batch.query)))


def test_row_groups_are_made_once_for_all_layers(make_batch: MakeBatch) -> None:
    metadata = make_batch([DECODE, CHUNK]).metadata
    assert metadata.row_groups(16, None) is metadata.row_groups(16, None)
    assert metadata.row_groups(16, 8) is not metadata.row_groups(16, None)


def test_writing_changes_the_given_slots_only(make_batch: MakeBatch) -> None:
    batch = make_batch([PROMPT])
    before = batch.kv_cache.clone()
    key = torch.ones(1, *batch.kv_cache.shape[3:])
    kernels.reshape_and_cache(key, 2 * key, batch.kv_cache, torch.tensor([1 * 16 + 15]))
    assert (batch.kv_cache[1, 0, 15] == 1).all()
    assert (batch.kv_cache[1, 1, 15] == 2).all()
    batch.kv_cache[1, :, 15] = before[1, :, 15]
    assert torch.equal(batch.kv_cache.nan_to_num(9.0), before.nan_to_num(9.0))
