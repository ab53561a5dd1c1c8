"""From bytes to float32: types that keep 256 values in a super-block, most with a small scale for each part of it.

As in dequantize_blocks. A part is a run of 16 or 32 values; ``d`` and ``dmin`` (float16) multiply the parts' integer
scales and offsets. All products are exact in float32: only the subtraction of an offset rounds.
"""

import numpy as np

from octavo.checkpoints.dequantize_blocks import Blocks, Values, halves, look_up_nibbles

__all__ = ["iq4_xs", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "tq1_0", "tq2_0"]


def q2_k(blocks: Blocks, values: Values) -> None:
    """Two bits a value; parts of 16.

        | 16 × (scale: low nibble, offset: high nibble) | 64 bytes q | d | dmin |

    Of each 32 bytes of q, the lowest bit pairs are 32 values, the next pairs the next 32, up to 128.
    value = d · scale · q - dmin · offset
    """
    _bit_pairs(blocks[:, 16:80], values)
    parts = values.reshape(-1, 16, 16)
    scales, offsets = halves(blocks, 80, 82), halves(blocks, 82, 84)
    parts *= (scales * (blocks[:, :16] & 15))[:, :, None]
    parts -= (offsets * (blocks[:, :16] >> 4))[:, :, None]


def q3_k(blocks: Blocks, values: Values) -> None:
    """Three bits a value; parts of 16.

        | 32 bytes of third bits | 64 bytes q, as in Q2_K | 12 bytes of scales | d |

    Bit i of third byte j belongs to value 32·i + j; scales are six bits each, see `_scales_of_q3`.
    value = d · (scale - 32) · (q + 4·third - 4)
    """
    _bit_pairs(blocks[:, 32:96], values)
    by_bit = values.reshape(-1, 8, 32)
    for bit in range(8):
        # 4 where the bit is not set.
        by_bit[:, bit] -= _shifted(~blocks[:, :32], bit - 2) & 4
    parts = values.reshape(-1, 16, 16)
    parts *= (halves(blocks, 108, 110) * _scales_of_q3(blocks[:, 96:108]))[:, :, None]


def _scales_of_q3(packed: Blocks) -> Values:
    """16 scales, -32 to 31, from 12 bytes.

    Low four bits: the low nibbles of bytes 0 to 7 are the first eight scales', the high nibbles the last eight's.
    High two bits: the lowest bit pairs of bytes 8 to 11 are scales 0 to 3's, the next pairs 4 to 7's, and so on.
    """
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales: Values = (low | high << 4).astype(np.float32)
    scales -= 32
    return scales


def q4_k(blocks: Blocks, values: Values) -> None:
    """Four bits a value; parts of 32.

        | d | dmin | 12 bytes of scales and offsets | 4 × 32 bytes of nibbles |

    The low nibbles of 32 bytes are one part, the high ones the next. Scales and offsets: `_scale_and_offset`.
    value = d · scale · q - dmin · offset
    """
    pairs = values.reshape(-1, 4, 2, 32)
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    pairs[:, :, 0] = packed & 15
    pairs[:, :, 1] = packed >> 4
    _scale_and_offset(blocks, values)


def q5_k(blocks: Blocks, values: Values) -> None:
    """Five bits a value; parts of 32.

        | d | dmin | 12 bytes of scales and offsets | 32 bytes of fifth bits | 4 × 32 bytes of nibbles, as in Q4_K |

    Bit i of fifth byte j belongs to value j of part i.
    value = d · scale · (q + 16·fifth) - dmin · offset
    """
    pairs = values.reshape(-1, 4, 2, 32)
    packed = blocks[:, 48:].reshape(-1, 4, 32)
    fifth = blocks[:, 16:48]
    for pair in range(4):
        pairs[:, pair, 0] = packed[:, pair] & 15 | _shifted(fifth, 2 * pair - 4) & 16
        pairs[:, pair, 1] = packed[:, pair] >> 4 | _shifted(fifth, 2 * pair - 3) & 16
    _scale_and_offset(blocks, values)


def _scale_and_offset(blocks: Blocks, values: Values) -> None:
    """Multiplies each part of 32 by d · scale and takes dmin · offset away: eight of each, six bits, in bytes 4 to 16.

    byte      0 … 3                       4 … 7                       8 … 11
    bits 0-5  scale of part byte          offset of part byte - 4     low four bits: scale of part byte - 4's
    bits 6-7  scale of part byte + 4's    offset of part byte's       high four bits: offset of part byte - 4's
              high two bits               high two bits               (low four bits of each)
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    offsets = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    parts = values.reshape(-1, 8, 32)
    parts *= (halves(blocks, 0, 2) * scales)[:, :, None]
    parts -= (halves(blocks, 2, 4) * offsets)[:, :, None]


def q6_k(blocks: Blocks, values: Values) -> None:
    """Six bits a value; parts of 16.

        | 2 × 64 bytes of nibbles | 2 × 32 bytes of high bit pairs | 16 × int8 scale | d |

    Each half of the super-block: the low nibbles of 64 bytes are 64 values, the high ones the next 64; the lowest bit
    pairs of 32 bytes belong to the first 32 values, the next pairs to the next 32, and so on.
    value = d · scale · (q - 32)
    """
    quarters = values.reshape(-1, 2, 4, 32)
    nibbles = blocks[:, :128].reshape(-1, 2, 2, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 32)
    for quarter in range(4):
        low = nibbles[:, :, quarter % 2] & 15 if quarter < 2 else nibbles[:, :, quarter % 2] >> 4
        quarters[:, :, quarter] = low | _shifted(pairs, 2 * quarter - 4) & 48
    values -= 32
    parts = values.reshape(-1, 16, 16)
    parts *= (halves(blocks, 208, 210) * blocks[:, 192:208].view(np.int8))[:, :, None]


def iq4_xs(blocks: Blocks, values: Values) -> None:
    """Four bits a value, steps as in IQ4_NL; parts of 32.

        | d | 8 × 2 high bits of the scales, lowest first | 4 bytes of their low nibbles | 8 × 16 bytes of nibbles |

    Scales of parts 0 and 1 have the low and the high nibble of the first of the four bytes, and so on.
    value = d · (scale - 32) · step[q]
    """
    look_up_nibbles(blocks[:, 8:].reshape(-1, 16), values.reshape(-1, 32))
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    high = (blocks[:, 2:4].copy().view("<u2") >> shifts & 3).astype(np.float32)
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    parts = values.reshape(-1, 8, 32)
    parts *= (halves(blocks, 0, 2) * (high * 16 + low - 32))[:, :, None]


def tq1_0(blocks: Blocks, values: Values) -> None:
    """Five ternary digits a byte.

        | 32 bytes: 160 values | 16 bytes: 80 values | 4 bytes: 16 values | d |

    A byte is its five digits read as a fraction of 256, rounded up: the first digit of all 32 bytes are the first 32
    values, the second the next 32, and so on. The last four bytes have only four digits.
    value = d · (digit - 1)
    """
    done = 0
    for first, last, num_digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        rest = blocks[:, first:last]
        for _ in range(num_digits):
            # Times three: the digit is what passes 256, and the rest is the fraction that is left.
            tripled = rest * np.uint16(3)
            values[:, done : done + last - first] = tripled >> 8
            rest = tripled.astype(np.uint8)
            done += last - first
    values -= 1
    values *= halves(blocks, 52, 54)


def tq2_0(blocks: Blocks, values: Values) -> None:
    """``| 64 bytes q, as in Q2_K | d |``: value = d · (q - 1)."""
    _bit_pairs(blocks[:, :64], values)
    values -= 1
    values *= halves(blocks, 64, 66)


def _bit_pairs(packed: Blocks, values: Values) -> None:
    """Of each 32 bytes, the lowest bit pairs are 32 numbers 0 to 3, the next pairs the next 32, and so on."""
    halves_of_four = values.reshape(-1, 2, 4, 32)
    packed = packed.reshape(-1, 2, 32)
    for pair in range(4):
        halves_of_four[:, :, pair] = packed >> 2 * pair & 3


def _shifted(bytes_: Blocks, right: int) -> Blocks:
    """Shifted to the right, or to the left where ``right`` is negative."""
    return bytes_ >> np.uint8(right) if right >= 0 else bytes_ << np.uint8(-right)
