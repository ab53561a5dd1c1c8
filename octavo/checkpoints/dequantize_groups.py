"""octavo's own storage types: a group of a row's values with one scale, which quantized weights of Hugging Face's
forms are turned into (quantization/).

Drawn as in dequantize_blocks.py, for groups of G values; ``d`` is a float32 number. A group is a multiple of 32 long,
so that each begins on a boundary of four bytes.
"""

import numpy as np

from octavo.checkpoints.dequantize_blocks import Blocks, Values

__all__ = ["FLOAT_HEADER_BYTES", "GROUP_STEP", "INTEGER_HEADER_BYTES", "e4m3_values", "f8_e4m3", "u4", "u8"]

GROUP_STEP = 32
INTEGER_HEADER_BYTES = 8
FLOAT_HEADER_BYTES = 4


def _scales(blocks: Blocks) -> Values:
    """[num_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, :4]).view("<f4")


def u4(blocks: Blocks, values: Values) -> None:
    """``| d | zero: uint8 | 3 bytes of 0 | G/2 bytes |``, two numbers a byte, the first one the low half:
    value = d · (q - zero)."""
    packed = blocks[:, INTEGER_HEADER_BYTES:]
    values[:, 0::2] = packed & 15
    values[:, 1::2] = packed >> 4
    values -= blocks[:, 4:5]
    values *= _scales(blocks)


def u8(blocks: Blocks, values: Values) -> None:
    """``| d | zero: uint8 | 3 bytes of 0 | G × uint8 |``: value = d · (q - zero)."""
    values[:] = blocks[:, INTEGER_HEADER_BYTES:]
    values -= blocks[:, 4:5]
    values *= _scales(blocks)


def _e4m3_table() -> Values:
    """What each byte stands for: a sign, four bits of exponent (bias 7), three of mantissa; no infinities, and all
    ones are not a number."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    size[byte & 127 == 127] = np.nan
    values: Values = np.copysign(size, np.where(byte < 128, 1.0, -1.0)).astype(np.float32)
    return values


_E4M3 = _e4m3_table()


def e4m3_values(codes: Blocks) -> Values:
    """The numbers that e4m3fn codes stand for, in a new array."""
    return _E4M3.take(codes)


def f8_e4m3(blocks: Blocks, values: Values) -> None:
    """``| d | G × e4m3fn |``: value = d · e4m3."""
    values[:] = _E4M3.take(blocks[:, FLOAT_HEADER_BYTES:])
    values *= _scales(blocks)
