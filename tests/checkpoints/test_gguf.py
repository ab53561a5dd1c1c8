"""The GGUF container: metadata, and damage of any kind. (Tensor types: test_gguf_types.py.)"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.checkpoints import iterate_tensors, read_gguf_metadata, read_model_facts
from octavo.errors import CheckpointError, ModelError

MakeGguf = Callable[..., Path]


def test_metadata_of_every_kind_come_back(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63 + 1)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("string", "naïve 🙂")
    writer.add_array("strings", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [1.5, 2.5])
    writer.add_array("bools", [True, False])
    writer.add_array("nested", [["x"], ["y", "z"]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_gguf_metadata(tmp_path / "m.gguf") == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -100,
        "u16": 60000,
        "i16": -30000,
        "u32": 4_000_000_000,
        "i32": -2_000_000_000,
        "u64": 2**63 + 1,
        "i64": -(2**62),
        "f32": 0.5,
        "f64": 0.1,
        "bool": True,
        "string": "naïve 🙂",
        "strings": ["a", "", "ü"],
        "numbers": [1, -2, 3],
        "floats": [1.5, 2.5],
        "bools": [True, False],
        "nested": [["x"], ["y", "z"]],
    }


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def field(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def container(
    *fields: bytes, tensors: tuple[bytes, ...] = (), data: bytes = b"", version: int = 3, align: int = 32
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % align) + data


def info(name: str, shape: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)


STRING, ARRAY, BOOL, UINT32 = 8, 9, 7, 4
ARCHITECTURE = field("general.architecture", STRING, text("llama"))
METADATA_FAULTS: dict[str, tuple[bytes, str]] = {
    "not a GGUF file": (b"GGML" + bytes(100), "not a GGUF file"),
    "empty": (b"", "not a GGUF file"),
    "no version": (b"GGUF\x03", "truncated"),
    "version 1": (container(version=1), "GGUF version 1; octavo reads versions 2 and 3"),
    "big-endian": (container(version=3 << 24), "big-endian"),
    "many fields": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "more than a file of 24 bytes can hold"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "more than a file of 24 bytes can hold"),
    "long key": (container(struct.pack("<Q", 2**40) + bytes(40)), "a string of 1099511627776 bytes"),
    "long string": (container(field("k", STRING, struct.pack("<Q", 2**20))), "'k': truncated"),
    "unknown value type": (container(field("k", 13, bytes(8))), "'k': value type 13"),
    "bool of 2": (container(field("k", BOOL, b"\x02")), "'k': a bool of value 2"),
    "bools of 2": (container(field("k", ARRAY, struct.pack("<IQ", BOOL, 1) + b"\x02")), "'k': a bool of value 2"),
    "long array": (container(field("k", ARRAY, struct.pack("<IQ", UINT32, 2**60))), "'k': an array of 1152921504606"),
    "array past the end": (container(field("k", ARRAY, struct.pack("<IQ", UINT32, 99))), "'k': truncated"),
    "strings past the end": (container(field("k", ARRAY, struct.pack("<IQ", STRING, 99))), "'k': truncated"),
    "long string in an array": (
        container(field("k", ARRAY, struct.pack("<IQ", STRING, 1) + struct.pack("<Q", 2**63))),
        "'k': truncated",
    ),
    "deep arrays": (
        container(field("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 50 + struct.pack("<IQ", UINT32, 0))),
        "'k': arrays nested more than",
    ),
    "array of an unknown type": (container(field("k", ARRAY, struct.pack("<IQ", 77, 1) + bytes(8))), "value type 77"),
    "key not UTF-8": (container(field(b"\xff", UINT32, bytes(4))), "not UTF-8"),
    "string not UTF-8": (container(field("k", STRING, text(b"\xff"))), "'k': a string that is not UTF-8"),
    "strings not UTF-8": (
        container(field("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text(b"\xff"))),
        "'k': string 1 of 2 is not UTF-8",
    ),
    "key twice": (container(*[field("k", UINT32, bytes(4))] * 2), "'k': stands twice"),
}


@pytest.mark.parametrize("fault", METADATA_FAULTS)
def test_malformed_metadata_are_named(tmp_path: Path, fault: str) -> None:
    raw, message = METADATA_FAULTS[fault]
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=message):
        read_gguf_metadata(tmp_path / "m.gguf")


def one_tensor(*args: Any, data: bytes = bytes(64), **options: Any) -> bytes:
    return container(ARCHITECTURE, tensors=(info(*args, **options),), data=data)


TENSOR_FAULTS: dict[str, tuple[bytes, str]] = {
    "no dimensions": (one_tensor("w", []), "'w': a name and 1 to 4 dimensions"),
    "five dimensions": (one_tensor("w", [1] * 5), "'w': a name and 1 to 4 dimensions"),
    "no name": (one_tensor("", [1]), "a name and 1 to 4 dimensions"),
    "long name": (one_tensor("w" * 600, [1]), "a string of 600 bytes"),
    "empty dimension": (one_tensor("w", [4, 0]), r"'w': shape \[0, 4\] has an empty dimension"),
    "overflow": (one_tensor("w", [2**63, 2**63]), "'w': truncated"),
    "half a block": (one_tensor("w", [16], type_id=8), "'w': rows of 16 values are not whole Q8_0 blocks of 32"),
    "crooked offset": (one_tensor("w", [1], offset=4), "'w': offset 4 is not a multiple of the alignment 32"),
    "past the end": (one_tensor("w", [17]), "'w': truncated: the file of .* ends 4 bytes before the tensor does"),
    "far past the end": (one_tensor("w", [1], offset=2**63), "'w': truncated"),
    "overlap": (
        container(ARCHITECTURE, tensors=(info("v", [16]), info("w", [1], offset=32)), data=bytes(64)),
        "'w': its data overlaps that of tensor 'v'",
    ),
    "same name": (
        container(ARCHITECTURE, tensors=(info("w", [1]), info("w", [1], offset=32)), data=bytes(64)),
        "'w': stands twice",
    ),
    "alignment 3": (
        container(ARCHITECTURE, field("general.alignment", UINT32, struct.pack("<I", 3))),
        "general.alignment must be a power of two up to 1048576, got 3",
    ),
    "alignment 0": (container(field("general.alignment", UINT32, bytes(4))), "general.alignment must be"),
    "alignment in words": (container(field("general.alignment", STRING, text("32"))), "general.alignment must be"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_malformed_tensor_list_names_the_tensor(tmp_path: Path, fault: str) -> None:
    raw, message = TENSOR_FAULTS[fault]
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        read_model_facts(tmp_path / "m.gguf")


def test_control_the_unharmed_container_gets_as_far_as_its_missing_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(one_tensor("w", [16]))
    with pytest.raises(CheckpointError, match=r"tensor 'token_embd.weight': missing"):
        read_model_facts(tmp_path / "m.gguf")


def test_another_alignment_and_version_2_are_read(make_gguf: MakeGguf) -> None:
    path = make_gguf(general__alignment=128)
    raw = bytearray(path.read_bytes())
    raw[4:8] = struct.pack("<I", 2)
    path.write_bytes(raw)
    expected = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    found = {tensor.name: tensor.to_float32() for tensor in iterate_tensors(path)}
    np.testing.assert_array_equal(found["model.norm.weight"], expected["output_norm.weight"])
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], expected["token_embd.weight"])


def test_a_truncated_file_names_file_and_tensor(make_gguf: MakeGguf) -> None:
    path = make_gguf("Q8_0")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated") as caught:
        read_model_facts(path)
    assert caught.value.file == str(path)
    assert caught.value.tensor == "output_norm.weight"


def damaged(raw: bytes, data: st.DataObject, data_start: int) -> bytes:
    """One fault: a cut, a changed byte, a huge or small number over eight bytes of the head."""
    kind = data.draw(st.sampled_from(["cut", "byte", "number"]))
    if kind == "cut":
        return raw[: data.draw(st.integers(0, len(raw) - 1))]
    at = data.draw(st.integers(0, data_start))
    number = st.sampled_from([0, 1, 255, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]).map(lambda n: struct.pack("<Q", n))
    noise = data.draw(st.binary(min_size=1, max_size=1) if kind == "byte" else number)
    return raw[:at] + noise + raw[at + len(noise) :]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_model_error_or_harmless(
    make_gguf: MakeGguf, load_guarded: Callable[[Path], ModelError | None], data: st.DataObject
) -> None:
    tokens = [f"t{index}" for index in range(10)]
    path = make_gguf("Q4_1", tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=None)
    raw = path.read_bytes()
    # The data end with a vector of float32, so that no cut falls into padding.
    result = damaged(raw, data, raw.index(b"output_norm.weight") + 40)
    path.write_bytes(result)
    assert load_guarded(path) is not None or len(result) == len(raw)
