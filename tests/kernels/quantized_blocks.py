"""Random weights of every type that products compute with as it is, and what those products are, exactly.

The types are read here once more, from their descriptions, into integers and scales; that the two agree with the values
that checkpoints are read as is a test of its own.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

GROUP = 32
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "U4:32", "U4:128", "U8:64"]
# Bytes of a block, values of it, and where its half-precision numbers lie.
_SHAPES = {
    "Q4_0": (18, 32, (0,)),
    "Q4_1": (20, 32, (0, 2)),
    "Q5_0": (22, 32, (0,)),
    "Q5_1": (24, 32, (0, 2)),
    "Q8_0": (34, 32, (0,)),
    "Q4_K": (144, 256, (0, 2)),
    "Q5_K": (176, 256, (0, 2)),
    "Q6_K": (210, 256, (208,)),
}


@dataclass
class Weight:
    """w = scale · (q - centre) - offset, all of them for each output and input or group of 16 inputs.

    Attributes:
        data: rows of blocks, 1-D.
        q: [out, in], unsigned.
        scale, offset, centre: [out, in / 16].
        halves: the two halves of a group have scales of their own.
    """

    data: Bytes
    q: Integers
    scale: Floats
    offset: Floats
    centre: Integers
    halves: bool = False

    def values(self) -> Floats:
        """[out, in]: each product rounded before the offset is taken away."""
        wide = [np.repeat(each, 16, axis=1) for each in (self.scale, self.offset, self.centre)]
        return (wide[0] * (self.q - wide[2]).astype(np.float32)) - wide[1]


def block_values(type_name: str) -> int:
    return _SHAPES[type_name][1] if type_name in _SHAPES else int(type_name.split(":")[1])


def draw(type_name: str, out_size: int, in_size: int, seed: int = 0) -> Weight:
    """Any bytes, but for scales of about 0.01."""
    rng = np.random.default_rng(seed)
    if type_name not in _SHAPES:
        return _draw_zeroed(rng, type_name, out_size, in_size)
    num_bytes, values, places = _SHAPES[type_name]
    blocks = rng.integers(0, 256, (out_size, in_size // values, num_bytes), np.uint8)
    for at in places:
        blocks[..., at : at + 2] = _random_scales(rng, blocks.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    if type_name.endswith("_K"):
        return _nested(type_name, blocks)
    return _small(type_name, blocks)


def _random_scales(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return (rng.standard_normal(shape) * 0.01).astype(np.float32)


def _half(blocks: Bytes, at: int) -> Floats:
    """[out, blocks]"""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _small(type_name: str, blocks: Bytes) -> Weight:
    out_size, count, _ = blocks.shape
    scale, offset = _half(blocks, 0), np.zeros((out_size, count), np.float32)
    centre, at = {"Q4_0": (8, 2), "Q5_0": (16, 2), "Q8_0": (0, 2)}.get(type_name, (0, 4))
    if type_name in ("Q4_1", "Q5_1"):
        offset = -_half(blocks, 2)
    if type_name == "Q8_0":
        q, centre = blocks[..., 2:].view(np.int8).astype(np.int64) + 128, 128
    else:
        high = np.zeros((out_size, count, GROUP), np.int64)
        if type_name.startswith("Q5"):
            high = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little").astype(np.int64)
            at += 4
        nibbles = blocks[..., at:]
        q = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.int64) + 16 * high
    wide = [np.repeat(each, 2, axis=1) for each in (scale, offset)]
    return Weight(blocks.reshape(-1), q.reshape(out_size, -1), *wide, np.full_like(wide[0], centre, np.int64))


def _nested(type_name: str, blocks: Bytes) -> Weight:
    out_size, count, _ = blocks.shape
    if type_name == "Q6_K":
        q = np.zeros((out_size, count, 256), np.int64)
        for i in range(256):
            half, quarter, k = i // 128, i // 32 % 4, i % 32
            nibble = blocks[..., half * 64 + quarter % 2 * 32 + k] >> (quarter // 2 * 4) & 15
            q[..., i] = nibble + 16 * (blocks[..., 128 + half * 32 + k] >> 2 * quarter & 3).astype(np.int64)
        scale = _half(blocks, 208)[..., None] * blocks[..., 192:208].view(np.int8).astype(np.float32)
        scale = scale.reshape(out_size, -1)
        centre = np.full_like(scale, 32, np.int64)
        return Weight(blocks.reshape(-1), q.reshape(out_size, -1), scale, np.zeros_like(scale), centre, halves=True)
    six = blocks[..., 4:16].astype(np.int64)
    scales = np.concatenate([six[..., :4] & 63, six[..., 8:] & 15 | six[..., :4] >> 6 << 4], axis=-1)
    offsets = np.concatenate([six[..., 4:8] & 63, six[..., 8:] >> 4 | six[..., 4:8] >> 6 << 4], axis=-1)
    nibbles = blocks[..., 48 if type_name == "Q5_K" else 16 :].reshape(out_size, count, 4, 1, 32)
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=3).astype(np.int64).reshape(out_size, count, 8, 32)
    if type_name == "Q5_K":
        q += 16 * np.stack([blocks[..., 16:48].astype(np.int64) >> part & 1 for part in range(8)], axis=2)
    scale = (_half(blocks, 0)[..., None] * scales.astype(np.float32)).reshape(out_size, -1)
    offset = (_half(blocks, 2)[..., None] * offsets.astype(np.float32)).reshape(out_size, -1)
    wide = [np.repeat(each, 2, axis=1) for each in (scale, offset)]
    return Weight(blocks.reshape(-1), q.reshape(out_size, -1), *wide, np.zeros_like(wide[0], np.int64))


def _draw_zeroed(rng: np.random.Generator, type_name: str, out_size: int, in_size: int) -> Weight:
    bits, span = 4 if type_name.startswith("U4") else 8, block_values(type_name)
    count = in_size // span
    scale = _random_scales(rng, (out_size, count))
    zero = rng.integers(0, 1 << bits, (out_size, count), np.uint8)
    q = rng.integers(0, 1 << bits, (out_size, count, span), np.uint8)
    numbers = q if bits == 8 else q[..., ::2] | q[..., 1::2] << 4
    padding = np.zeros((out_size, count, 3), np.uint8)
    data = np.concatenate([scale[..., None].view(np.uint8), zero[..., None], padding, numbers], axis=-1)
    wide = [np.repeat(each, span // 16, axis=1) for each in (scale, zero.astype(np.int64))]
    q_rows = q.astype(np.int64).reshape(out_size, in_size)
    return Weight(data.reshape(-1), q_rows, wide[0], np.zeros_like(wide[0]), wide[1])


def quantized(x: Floats) -> tuple[Integers, Floats]:
    """([rows, in] from -127 to 127, scales [rows, in / 32]) of rows whose groups' largest numbers are not tiny."""
    groups = x.reshape(len(x), -1, GROUP)
    most = np.abs(groups).max(-1)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    q = np.rint(groups * inverse[..., None]).astype(np.int64)
    return q.reshape(x.shape), most / np.float32(127)


def product(x: Floats, weight: Weight, *, fused: bool) -> Floats:
    """[rows, out]: integer sums of groups, added in float32 from the first group to the last.

    Args:
        fused: a product and the sum that it is added to are rounded once.
    """
    q, x_scale = quantized(x)
    sums = np.zeros((len(x), len(weight.q)), np.float32)
    step = GROUP // 2 if weight.halves else GROUP
    for begin in range(0, x.shape[1], step):
        own, group = slice(begin, begin + step), begin // GROUP
        scale, offset, centre = (each[:, begin // 16] for each in (weight.scale, weight.offset, weight.centre))
        total = q[:, own] @ (weight.q[:, own] - centre[:, None]).T
        sums = _add(sums, scale[None] * x_scale[:, group, None], total.astype(np.float32), fused)
        if np.any(weight.offset):
            beside = x_scale[:, group] * q[:, own].sum(1).astype(np.float32)
            sums = _add(sums, -offset[None], beside[:, None], fused)
    return sums


def _add(sums: Floats, a: Floats, b: Floats, fused: bool) -> Floats:
    if not fused:
        return sums + a * b
    # 64 bits of mantissa hold the product of two float32 numbers, and the sum but for the rarest.
    wide = sums.astype(np.longdouble) + a.astype(np.longdouble) * b.astype(np.longdouble)
    return wide.astype(np.float32)
