"""Rotary tables: what scales frequencies, and what cannot be put into a table. (Against transformers: tests/models.)"""

import math

import pytest
import torch

from octavo.errors import ModelError, UnsupportedError
from octavo.layers import RotaryEmbedding


def test_the_table_holds_cosines_then_sines() -> None:
    table = RotaryEmbedding(4, 10, 100.0).cos_sin
    assert table.shape == (10, 4)
    for position in range(10):
        angles = [position, position / 10]
        expected = [*map(math.cos, angles), *map(math.sin, angles)]
        assert table[position].tolist() == pytest.approx(expected, abs=1e-6)


def test_frequency_factors_divide() -> None:
    plain = RotaryEmbedding(4, 10, 100.0).cos_sin
    table = RotaryEmbedding(4, 10, 100.0, freq_factors=[1.0, 2.0]).cos_sin
    assert torch.equal(table[:, 0], plain[:, 0])
    torch.testing.assert_close(table[::2, 1], plain[:5, 1])


def test_a_channel_past_the_rotated_ones_is_left() -> None:
    rotary = RotaryEmbedding(4, 10, 100.0)
    query, key = torch.randn(3, 2, 6), torch.randn(3, 1, 6)
    turned, _ = rotary(torch.tensor([0, 5, 9]), query, key)
    assert torch.equal(turned[..., 4:], query[..., 4:])
    assert torch.equal(turned[0], query[0])
    assert not torch.equal(turned[1, :, :4], query[1, :, :4])


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "abacus"])
def test_a_scaling_without_a_table_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{kind}' is not supported; supported: default, linear, llama3, yarn"):
        RotaryEmbedding(4, 10, 100.0, {"rope_type": kind, "factor": 2.0})


def test_a_table_beyond_reason_is_refused_with_the_flag_to_lower() -> None:
    with pytest.raises(ModelError, match=r"2147483647 positions takes 1024\.0 GiB.*--max-model-len"):
        RotaryEmbedding(128, 2**31 - 1, 10000.0)
