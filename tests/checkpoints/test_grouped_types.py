"""octavo's own storage types, against the layout's definition written out value by value, and torch's float8."""

import struct

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.checkpoints import CheckpointTensor, to_float32
from octavo.errors import UnsupportedError

RANDOM = np.random.default_rng(0)


def integer_block(bits: int, scale: float, zero: int, numbers: npt.NDArray[np.uint8]) -> bytes:
    header = struct.pack("<fBBBB", scale, zero, 0, 0, 0)
    if bits == 8:
        return header + numbers.tobytes()
    return header + bytes(int(low) | int(high) << 4 for low, high in zip(numbers[::2], numbers[1::2], strict=True))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [32, 64, 128, 96, 65536 + 32])
def test_integers_in_groups(bits: int, size: int) -> None:
    scales = [0.037, -1.5e-3, 2.0]
    zeros = [8, 0, 15] if bits == 4 else [128, 0, 255]
    numbers = RANDOM.integers(0, 2**bits, (3, size)).astype(np.uint8)
    data = b"".join(map(integer_block, [bits] * 3, scales, zeros, numbers))
    expected = [
        [np.float32(scale) * np.float32(int(number) - zero) for number in row]
        for scale, zero, row in zip(scales, zeros, numbers, strict=True)
    ]
    found = to_float32(f"U{bits}:{size}", np.frombuffer(data, np.uint8))
    np.testing.assert_array_equal(found, np.array(expected, np.float32).reshape(-1))


def test_eight_bit_floats_in_groups() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    scales = np.array([[1.0], [0.3], [2.0**-9], [-7.0]], np.float32)
    data = np.concatenate([scales.view(np.uint8), codes], axis=1).reshape(-1)
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(to_float32("F8_E4M3:64", data), (values * scales).reshape(-1))


@pytest.mark.parametrize("name", ["U4:0", "U4:16", "U4:100", "U4:-32", "U4", "U5:32", "U8:032", "U4:32 ", "F8_E5M2:32"])
def test_a_name_that_is_no_type_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"type {name} is not read yet"):
        to_float32(name, np.zeros(64, np.uint8))


def test_rows_are_cut_between_blocks() -> None:
    rows = np.concatenate(
        [np.frombuffer(integer_block(4, 0.5, 8, RANDOM.integers(0, 16, 64).astype(np.uint8)), np.uint8)] * 128
    )
    tensor = CheckpointTensor("w", "U4:64", (64, 128), rows, "file")
    pieces = list(tensor.row_pieces(1600))
    assert [(first, piece.shape) for first, piece in pieces] == [(first, (16, 128)) for first in range(0, 64, 16)]
    found = np.concatenate([piece.to_float32() for _, piece in pieces])
    np.testing.assert_array_equal(found, tensor.to_float32())
