"""Every tensor type of GGUF: read bit for bit as the `gguf` package does, or refused by name."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.checkpoints import CheckpointTensor, iterate_tensors, read_model_facts
from octavo.errors import UnsupportedError

READ = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
READ += ["IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"]
# Where a block has its float16 scales; MXFP4 has a byte of exponent at 0.
SCALES_AT = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
WIDTH = 256
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def sizes(type_name: str) -> tuple[int, int]:
    """(values, bytes) of a block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]


def random_rows(type_name: str, rows: int, seed: int = 1) -> Bytes:
    """Bytes of ``rows`` rows of WIDTH values: any bytes are a tensor, infinite and absent scales included."""
    block_size, block_bytes = sizes(type_name)
    return np.random.default_rng(seed).integers(0, 256, (rows, WIDTH // block_size * block_bytes), dtype=np.uint8)


def with_scales(type_name: str, rows: Bytes, scales: list[float]) -> Bytes:
    """A copy whose scales are these, over and over."""
    blocks = rows.copy().reshape(-1, sizes(type_name)[1])
    numbers = np.resize(np.array(scales, "<f2"), len(blocks)).view(np.uint8).reshape(-1, 2)
    for shift, at in enumerate(SCALES_AT.get(type_name, ())):
        blocks[:, at : at + 2] = np.roll(numbers, shift, axis=0)
    if type_name == "MXFP4":
        blocks[:, 0] = np.resize(np.arange(256), len(blocks)) if len(scales) > 1 else 127
    return blocks.reshape(rows.shape)


def write_tensor(path: Path, type_name: str, data: np.ndarray[Any, Any]) -> Path:
    """A Llama whose embedding is ``data``, and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "llama.block_count": 1,
        "llama.context_length": 32,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
    }.items():
        writer.add_uint32(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", data, raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_tensor(path: Path, type_name: str, data: Bytes) -> CheckpointTensor:
    (tensor,) = iterate_tensors(write_tensor(path / "m.gguf", type_name, data))
    return tensor


def by_gguf(type_name: str, data: Bytes) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name])


def assert_same_bits(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Which of the many NaNs it is does not matter."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


# More rows than are dequantized at a time, and not a multiple of them.
@pytest.mark.parametrize("rows", [1, 777])
@pytest.mark.parametrize("type_name", READ)
def test_each_type_equals_the_gguf_package_bit_for_bit(tmp_path: Path, type_name: str, rows: int) -> None:
    data = random_rows(type_name, rows)
    tensor = read_tensor(tmp_path, type_name, data)
    assert (tensor.name, tensor.type, tensor.shape) == ("model.embed_tokens.weight", type_name, (rows, WIDTH))
    assert_same_bits(tensor.to_float32(), by_gguf(type_name, data))


@pytest.mark.parametrize("type_name", [*SCALES_AT, "MXFP4"])
def test_extreme_scales_are_the_files_values(tmp_path: Path, type_name: str) -> None:
    """Zeros of both signs, the smallest and the largest number, infinities, and no number at all."""
    extremes = [0.0, -0.0, 6e-8, -6e-8, 6e-5, 65504.0, -65504.0, np.inf, -np.inf, np.nan, 1.0]
    data = with_scales(type_name, random_rows(type_name, 40), extremes)
    expected = by_gguf(type_name, data)
    assert np.isinf(expected).any()
    assert np.isnan(expected).any() or type_name == "MXFP4"
    assert (expected == 0).any()
    assert_same_bits(read_tensor(tmp_path, type_name, data).to_float32(), expected)


@pytest.mark.parametrize("type_name", READ)
def test_control_every_byte_of_a_block_counts(tmp_path: Path, type_name: str) -> None:
    """So a layout with a byte in the wrong place would be seen."""
    block_bytes = sizes(type_name)[1]
    row = with_scales(type_name, random_rows(type_name, 1, seed=4), [1.0])
    rows = np.repeat(row, block_bytes, axis=0)
    rows[np.arange(block_bytes), np.arange(block_bytes)] ^= 0x55
    changed = read_tensor(tmp_path, type_name, rows).to_float32()
    same = read_tensor(tmp_path, type_name, row).to_float32()
    assert (changed.view(np.uint32) != same.view(np.uint32)).any(axis=1).all()


@pytest.mark.parametrize("type_name", [kind.name for kind in gguf.GGMLQuantizationType if kind.name not in READ])
def test_every_other_type_is_refused_by_name(tmp_path: Path, type_name: str) -> None:
    path = write_tensor(tmp_path / "m.gguf", "F32", np.zeros((2, WIDTH), np.float32))
    raw = bytearray(path.read_bytes())
    at = raw.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    raw[at : at + 4] = struct.pack("<I", gguf.GGMLQuantizationType[type_name])
    path.write_bytes(raw + bytes(2 * WIDTH * 8))
    supported = ", ".join(READ[:2])
    with pytest.raises(UnsupportedError, match=rf"'token_embd.weight': type {type_name} .*: {supported}") as caught:
        read_model_facts(path)
    listed = str(caught.value).rpartition("supported: ")[2].split(", ")
    assert sorted(listed) == sorted(READ)


def test_withdrawn_and_unknown_types_are_refused(tmp_path: Path) -> None:
    path = write_tensor(tmp_path / "m.gguf", "F32", np.zeros((2, WIDTH), np.float32))
    raw = bytearray(path.read_bytes())
    at = raw.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    for type_id, message in ((31, "Q4_0_4_4, which GGUF has withdrawn"), (999, "type id 999")):
        raw[at : at + 4] = struct.pack("<I", type_id)
        path.write_bytes(raw)
        with pytest.raises(UnsupportedError, match=message):
            read_model_facts(path)
