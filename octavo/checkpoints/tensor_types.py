"""The data types that tensors are stored in: how large a block is, and how it becomes float32.

One table per file format, each type one entry. A type that octavo knows but does not read has no dequantize function
and is refused by name. To read one more, write its function (dequantize_*.py) and name it in the table. Types of
octavo's own, which the formats of quantization/ are turned into, have the group's size in their name (``U4:128``).
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.checkpoints import dequantize_blocks as blocks32
from octavo.checkpoints import dequantize_groups as groups
from octavo.checkpoints import dequantize_superblocks as blocks256
from octavo.checkpoints.dequantize_blocks import Blocks, Values
from octavo.errors import UnsupportedError

__all__ = [
    "GGML_TYPES",
    "READABLE_TYPES",
    "REMOVED_GGML_TYPES",
    "SAFETENSORS_TYPES",
    "TensorType",
    "float32_pieces",
    "readable_type",
    "to_float32",
]

Dequantize = Callable[[Blocks, Values], None]

# Values dequantized at a time: 256 KiB of float32 stay in the L2 cache while several passes go over them.
_PIECE_VALUES = 65536


@dataclass(frozen=True)
class TensorType:
    """A storage type.

    Attributes:
        name: as its format spells it.
        block_size: values in a block (1 for plain types).
        block_bits: bits of a block.
        dequantize: fills ``values`` from ``blocks``; None where octavo does not read the type.
    """

    name: str
    block_size: int
    block_bits: int
    dequantize: Dequantize | None = None

    @property
    def block_bytes(self) -> int:
        return self.block_bits // 8


def _ggml(name: str, block_size: int, block_bytes: int, dequantize: Dequantize | None = None) -> TensorType:
    return TensorType(name, block_size, 8 * block_bytes, dequantize)


# ggml's type ids.
GGML_TYPES: dict[int, TensorType] = {
    0: _ggml("F32", 1, 4, blocks32.f32),
    1: _ggml("F16", 1, 2, blocks32.f16),
    2: _ggml("Q4_0", 32, 18, blocks32.q4_0),
    3: _ggml("Q4_1", 32, 20, blocks32.q4_1),
    6: _ggml("Q5_0", 32, 22, blocks32.q5_0),
    7: _ggml("Q5_1", 32, 24, blocks32.q5_1),
    8: _ggml("Q8_0", 32, 34, blocks32.q8_0),
    9: _ggml("Q8_1", 32, 40),
    10: _ggml("Q2_K", 256, 84, blocks256.q2_k),
    11: _ggml("Q3_K", 256, 110, blocks256.q3_k),
    12: _ggml("Q4_K", 256, 144, blocks256.q4_k),
    13: _ggml("Q5_K", 256, 176, blocks256.q5_k),
    14: _ggml("Q6_K", 256, 210, blocks256.q6_k),
    15: _ggml("Q8_K", 256, 292),
    16: _ggml("IQ2_XXS", 256, 66),
    17: _ggml("IQ2_XS", 256, 74),
    18: _ggml("IQ3_XXS", 256, 98),
    19: _ggml("IQ1_S", 256, 50),
    20: _ggml("IQ4_NL", 32, 18, blocks32.iq4_nl),
    21: _ggml("IQ3_S", 256, 110),
    22: _ggml("IQ2_S", 256, 82),
    23: _ggml("IQ4_XS", 256, 136, blocks256.iq4_xs),
    24: _ggml("I8", 1, 1),
    25: _ggml("I16", 1, 2),
    26: _ggml("I32", 1, 4),
    27: _ggml("I64", 1, 8),
    28: _ggml("F64", 1, 8),
    29: _ggml("IQ1_M", 256, 56),
    30: _ggml("BF16", 1, 2, blocks32.bf16),
    34: _ggml("TQ1_0", 256, 54, blocks256.tq1_0),
    35: _ggml("TQ2_0", 256, 66, blocks256.tq2_0),
    39: _ggml("MXFP4", 32, 17, blocks32.mxfp4),
    40: _ggml("NVFP4", 64, 36),
    41: _ggml("Q1_0", 128, 18),
}

# Ids that old files may hold and that the format has since withdrawn.
REMOVED_GGML_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

SAFETENSORS_TYPES: dict[str, TensorType] = {
    entry.name: entry
    for entry in (
        TensorType("F32", 1, 32, blocks32.f32),
        TensorType("F16", 1, 16, blocks32.f16),
        TensorType("BF16", 1, 16, blocks32.bf16),
        TensorType("F64", 1, 64),
        TensorType("C64", 1, 64),
        TensorType("BOOL", 1, 8),
        TensorType("I8", 1, 8),
        TensorType("U8", 1, 8),
        TensorType("I16", 1, 16),
        TensorType("U16", 1, 16),
        TensorType("I32", 1, 32),
        TensorType("U32", 1, 32),
        TensorType("I64", 1, 64),
        TensorType("U64", 1, 64),
        TensorType("F8_E4M3", 1, 8),
        TensorType("F8_E5M2", 1, 8),
        TensorType("F8_E4M3FNUZ", 1, 8),
        TensorType("F8_E5M2FNUZ", 1, 8),
        TensorType("F8_E8M0", 1, 8),
        TensorType("F6_E2M3", 1, 6),
        TensorType("F6_E3M2", 1, 6),
        TensorType("F4", 1, 4),
    )
}

READABLE_TYPES: dict[str, TensorType] = {
    entry.name: entry for entry in (*SAFETENSORS_TYPES.values(), *GGML_TYPES.values()) if entry.dequantize is not None
}


# Name → bits of a value, bytes before a group's values, function. See dequantize_groups.py for the layout.
_GROUPED: dict[str, tuple[int, int, Dequantize]] = {
    "U4": (4, groups.INTEGER_HEADER_BYTES, groups.u4),
    "U8": (8, groups.INTEGER_HEADER_BYTES, groups.u8),
    "F8_E4M3": (8, groups.FLOAT_HEADER_BYTES, groups.f8_e4m3),
}
_GROUPED_NAME = re.compile(rf"({'|'.join(_GROUPED)}):([1-9][0-9]{{0,7}})")


@functools.lru_cache(maxsize=256)
def readable_type(type_name: str) -> TensorType:
    """The type of that name, whose ``dequantize`` is there: one of the tables' or a grouped one.

    Raises:
        UnsupportedError: a type that octavo does not read.
    """
    found = READABLE_TYPES.get(type_name)
    if found is not None:
        return found
    grouped = _GROUPED_NAME.fullmatch(type_name)
    if grouped is None or int(grouped[2]) % groups.GROUP_STEP:
        raise UnsupportedError(f"type {type_name} is not read yet; supported: {', '.join(READABLE_TYPES)}")
    bits, header_bytes, dequantize = _GROUPED[grouped[1]]
    size = int(grouped[2])
    return TensorType(type_name, size, 8 * header_bytes + bits * size, dequantize)


def float32_pieces(type_name: str, data: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.float32]]:
    """``data`` (bytes of whole blocks, 1-D) as float32 values, in order, in 1-D pieces that stay in the CPU's cache.

    A piece is overwritten by the next one.

    Raises:
        UnsupportedError: a type that octavo does not read.
    """
    entry = readable_type(type_name)
    assert entry.dequantize is not None
    blocks = data.reshape(-1, entry.block_bytes)
    step = max(_PIECE_VALUES // entry.block_size, 1)
    piece = np.empty((min(step, len(blocks)), entry.block_size), np.float32)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        values = piece[: len(part)]
        # A damaged scale may be infinite: that is the file's value, not a fault of the arithmetic.
        with np.errstate(all="ignore"):
            entry.dequantize(part, values)
        yield values.reshape(-1)


def to_float32(type_name: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """As `float32_pieces`, all in one new array."""
    entry = readable_type(type_name)
    values = np.empty(len(data) // entry.block_bytes * entry.block_size, np.float32)
    done = 0
    for piece in float32_pieces(type_name, data):
        values[done : done + len(piece)] = piece
        done += len(piece)
    return values
