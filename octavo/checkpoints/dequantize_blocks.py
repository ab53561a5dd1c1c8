"""From bytes to float32: plain types, and those that keep 32 values in a block with one scale.

Each function fills ``values`` [num_blocks, block_size] from ``blocks`` [num_blocks, block_bytes] and makes no array
larger than these. The drawings show a block's bytes from left to right; ``d`` (and ``m``) are float16 numbers.
"""

import numpy as np
import numpy.typing as npt

__all__ = [
    "Blocks",
    "Values",
    "bf16",
    "f16",
    "f32",
    "halves",
    "iq4_nl",
    "look_up_nibbles",
    "mxfp4",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
]

Blocks = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]


def f32(blocks: Blocks, values: Values) -> None:
    values[:] = blocks.view("<f4")


def f16(blocks: Blocks, values: Values) -> None:
    values[:] = blocks.view("<f2")


def bf16(blocks: Blocks, values: Values) -> None:
    np.left_shift(blocks.view("<u2"), 16, out=values.view(np.uint32), dtype=np.uint32)


def halves(blocks: Blocks, first: int, last: int) -> Values:
    """The float16 numbers in bytes ``first`` to ``last`` of each block, widened."""
    return np.ascontiguousarray(blocks[:, first:last]).view("<f2").astype(np.float32)


def _nibbles(packed: Blocks, values: Values) -> None:
    """Four-bit numbers 0 to 15: the low halves of the bytes are a block's first half, the high ones its second."""
    half = packed.shape[1]
    values[:, :half] = packed & 15
    values[:, half:] = packed >> 4


def q8_0(blocks: Blocks, values: Values) -> None:
    """``| d | 32 × int8 |``: value = d · q."""
    values[:] = blocks[:, 2:].view(np.int8)
    values *= halves(blocks, 0, 2)


def q4_0(blocks: Blocks, values: Values) -> None:
    """``| d | 16 bytes of nibbles |``: value = d · (q - 8)."""
    _nibbles(blocks[:, 2:], values)
    values -= 8
    values *= halves(blocks, 0, 2)


def q4_1(blocks: Blocks, values: Values) -> None:
    """``| d | m | 16 bytes of nibbles |``: value = d · q + m."""
    _nibbles(blocks[:, 4:], values)
    values *= halves(blocks, 0, 2)
    values += halves(blocks, 2, 4)


def _five_bits(high: Blocks, packed: Blocks, values: Values) -> None:
    """Numbers 0 to 31: nibbles, and a fifth bit for each of the 32 values, the first value's the lowest."""
    fifth = np.unpackbits(high, axis=1, bitorder="little")
    fifth <<= 4
    fifth[:, :16] |= packed & 15
    fifth[:, 16:] |= packed >> 4
    values[:] = fifth


def q5_0(blocks: Blocks, values: Values) -> None:
    """``| d | 4 bytes of fifth bits | 16 bytes of nibbles |``: value = d · (q - 16)."""
    _five_bits(blocks[:, 2:6], blocks[:, 6:], values)
    values -= 16
    values *= halves(blocks, 0, 2)


def q5_1(blocks: Blocks, values: Values) -> None:
    """``| d | m | 4 bytes of fifth bits | 16 bytes of nibbles |``: value = d · q + m."""
    _five_bits(blocks[:, 4:8], blocks[:, 8:], values)
    values *= halves(blocks, 0, 2)
    values += halves(blocks, 2, 4)


# What the sixteen nibbles stand for, times a scale: steps that are finer near zero.
_IQ4_STEPS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# FP4 (one sign bit, two of exponent, one of mantissa), doubled to be whole; both zeros are +0.
_FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


# 2^(e - 127) for each e, halved to go with them.
_FP4_SCALES = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)


def _byte_tables(steps: tuple[int, ...]) -> tuple[Values, Values]:
    """What each byte's low half stands for, and what its high half does."""
    table = np.array(steps, np.float32)
    every_byte = np.arange(256)
    return table[every_byte & 15], table[every_byte >> 4]


_IQ4 = _byte_tables(_IQ4_STEPS)
_FP4 = _byte_tables(_FP4_DOUBLED)


def look_up_nibbles(packed: Blocks, values: Values, tables: tuple[Values, Values] = _IQ4) -> None:
    """As `_nibbles`, and each number stands for an entry of a table."""
    half = packed.shape[1]
    values[:, :half] = tables[0].take(packed)
    values[:, half:] = tables[1].take(packed)


def iq4_nl(blocks: Blocks, values: Values) -> None:
    """``| d | 16 bytes of nibbles |``: value = d · step[q]."""
    look_up_nibbles(blocks[:, 2:], values)
    values *= halves(blocks, 0, 2)


def mxfp4(blocks: Blocks, values: Values) -> None:
    """``| e | 16 bytes of nibbles |``: value = 2^(e - 127) · fp4[q]. (OCP's e = 255, not a number, is 2^128 here.)"""
    look_up_nibbles(blocks[:, 1:], values, _FP4)
    values *= _FP4_SCALES[blocks[:, :1]]
