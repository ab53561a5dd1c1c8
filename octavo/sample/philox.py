"""Philox-4x32-10, the counter-based random number generator (Salmon et al., SC 2011), over arrays of counters.

There is no state: a row's number depends on its key and counter alone, so on nothing else in the batch.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["philox_4x32", "uniforms"]

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
# Multipliers and Weyl constants of the generator's definition; the first of each belongs to counter words 0 and 1.
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox_4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Four random 32-bit words for each column.

    Args:
        counter: [4, n], words below 2**32.
        key: [2, n], likewise.

    Returns:
        [4, n], likewise.
    """
    # The words that are multiplied (0, 2) and the words that are mixed in (1, 3) change places in every round.
    multiplied, mixed = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = multiplied * _MULTIPLIERS
        multiplied = (product >> _SHIFT)[::-1] ^ mixed ^ key
        mixed = (product & _LOW)[::-1]
        key = (key + _WEYL) & _LOW
    return np.stack([multiplied[0], mixed[0], multiplied[1], mixed[1]])


def uniforms(
    seed: NDArray[np.int64], choice_index: NDArray[np.int64], output_position: NDArray[np.int64]
) -> NDArray[np.float64]:
    """One number in [0, 1) for each row, a multiple of 2**-53. Its product with a total is below that total.

    Args:
        seed, choice_index, output_position: [n]; all 64 bits of the seed count, the lower 32 of the others.
    """
    bits = seed.astype(np.uint64)
    key = np.stack([bits & _LOW, bits >> _SHIFT])
    counter = np.zeros((4, len(seed)), dtype=np.uint64)
    counter[0] = output_position.astype(np.uint64) & _LOW
    counter[1] = choice_index.astype(np.uint64) & _LOW
    words = philox_4x32(counter, key)
    fraction: NDArray[np.uint64] = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))
    return np.ldexp(fraction.astype(np.float64), -53)
