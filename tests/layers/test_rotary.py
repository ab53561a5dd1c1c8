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


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 2.0],
    "long_factor": [3.0, 5.0],
    "original_max_position_embeddings": 8,
    "attention_factor": 1.5,
}


@pytest.mark.parametrize(("max_position", "factors"), [(8, [1.0, 2.0]), (9, [3.0, 5.0])])
def test_longrope_takes_one_list_for_all_positions_and_says_which(
    max_position: int, factors: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="octavo"):
        table = RotaryEmbedding(4, max_position, 100.0, LONGROPE).cos_sin
    for position in range(max_position):
        angles = [position / factors[0], position / 10 / factors[1]]
        expected = [1.5 * value for value in (*map(math.cos, angles), *map(math.sin, angles))]
        assert table[position].tolist() == pytest.approx(expected, abs=1e-5)
    kind = "short" if max_position == 8 else "long"
    assert f"the {kind} factors for every sequence: max_model_len is {max_position}" in caplog.text


def test_longrope_factors_must_be_one_for_each_frequency() -> None:
    with pytest.raises(ModelError, match=r"rope_scaling\.short_factor has 2 numbers, expected 3"):
        RotaryEmbedding(6, 8, 100.0, LONGROPE)


@pytest.mark.parametrize("kind", ["dynamic", "abacus"])
def test_a_scaling_without_a_table_is_refused_by_name(kind: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"'{kind}' is not supported; supported: default, linear, llama3, longrope, yarn"
    ):
        RotaryEmbedding(4, 10, 100.0, {"rope_type": kind, "factor": 2.0})


def test_a_table_beyond_reason_is_refused_with_the_flag_to_lower() -> None:
    with pytest.raises(ModelError, match=r"2147483647 positions takes 1024\.0 GiB.*--max-model-len"):
        RotaryEmbedding(128, 2**31 - 1, 10000.0)


def test_a_table_that_the_allocator_refuses_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 536870912 bytes")

    monkeypatch.setattr(torch, "outer", refuse)
    with pytest.raises(ModelError, match="a rotary table for 10 positions does not fit into memory; lower --max-model"):
        RotaryEmbedding(4, 10, 100.0)
