"""The random numbers: Philox-4x32-10 as published, one number a key and counter, whatever the batch."""

import numpy as np
import pytest

from octavo.sample import philox_4x32, uniforms

# Known answers that the authors publish with their library (Random123, kat_vectors, philox4x32 with 10 rounds).
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def columns(values: list[list[int]]) -> np.ndarray:
    return np.array(values, dtype=np.uint64).T


def draw(seed: list[int], choice: list[int], position: list[int]) -> list[float]:
    return uniforms(*(np.array(values, dtype=np.int64) for values in (seed, choice, position))).tolist()


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox_4x32(columns([counter]), columns([key]))[:, 0].tolist() == expected


def test_many_columns_at_once_give_what_each_gives_alone() -> None:
    counters, keys, expected = zip(*KNOWN, strict=True)
    assert philox_4x32(columns(list(counters)), columns(list(keys))).T.tolist() == list(expected)


def test_a_uniform_is_made_of_the_upper_53_bits_of_the_first_two_words() -> None:
    assert draw([0], [0], [0]) == [((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53]


def test_every_part_of_the_key_counts_and_equal_keys_agree() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 1 << 32, 0, 0, 0]
    choices = [0, 0, 0, 0, 0, 0, 1, 0, 0]
    positions = [0, 0, 0, 0, 0, 0, 0, 1, 2]
    numbers = draw(seeds, choices, positions)
    assert len(set(numbers)) == len(numbers)
    assert numbers == [draw([s], [c], [p])[0] for s, c, p in zip(seeds, choices, positions, strict=True)]


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    count = 20_000
    numbers = np.array(draw([7] * count, [0] * count, list(range(count))))
    counts = np.bincount((numbers * 10).astype(int), minlength=10)
    assert ((counts - count / 10) ** 2 / (count / 10)).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("word", "number"), [(0, 0.0), (0xFFFFFFFF, 1 - 2**-53)])
def test_uniforms_reach_from_0_to_just_below_1(monkeypatch: pytest.MonkeyPatch, word: int, number: float) -> None:
    monkeypatch.setattr("octavo.sample.philox.philox_4x32", lambda counter, key: np.full_like(counter, word))
    assert draw([1], [2], [3]) == [number]
    assert number < 1.0


def test_the_largest_uniform_times_a_total_stays_below_the_total() -> None:
    largest = (2**53 - 1) / 2**53
    for total in (1.0, 1.0000000000000002, 1.5, 2.0 - 2**-52, 2.0, 3.0000000000000004, 49152.0, 1e300):
        assert largest * total < total
    # The control: a number one bit finer rounds up to the total.
    assert (1 - 2**-54) * 1.5 == 1.5
