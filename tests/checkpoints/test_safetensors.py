"""Folders of safetensors: what is read, and that damage of any kind is named and nothing worse."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.checkpoints import CheckpointTensor, iterate_tensors, read_model_facts
from octavo.errors import CheckpointError, ModelError, UnsupportedError

MakeFolder = Callable[..., Path]
FIRST = "model.embed_tokens.weight"


def tensors_of(path: Path) -> dict[str, CheckpointTensor]:
    return {tensor.name: tensor for tensor in iterate_tensors(path)}


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(file: Path, header: str, data: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header.encode())) + header.encode() + data)


def test_every_tensor_is_read_as_it_was_written(make_folder: MakeFolder, weights: dict[str, Any]) -> None:
    found = tensors_of(make_folder())
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        assert (tensor.type, tensor.shape) == ("F32", weights[name].shape)
        np.testing.assert_array_equal(tensor.to_float32(), weights[name])
        assert tensor.data.dtype == np.uint8
        assert not tensor.data.flags.writeable


@pytest.mark.parametrize(
    ("dtype", "type_name"), [(torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")]
)
def test_each_float_type_widens_to_the_same_numbers(
    make_folder: MakeFolder, weights: dict[str, Any], dtype: torch.dtype, type_name: str
) -> None:
    folder = make_folder(torch_dtype=...)
    written = {name: torch.from_numpy(weight).to(dtype) for name, weight in weights.items()}
    safetensors.torch.save_file(written, folder / "model.safetensors")
    for name, tensor in tensors_of(folder).items():
        assert tensor.type == type_name
        np.testing.assert_array_equal(tensor.to_float32(), written[name].float().numpy())
    assert read_model_facts(folder).dtype == str(dtype).removeprefix("torch.")


def test_shards_give_the_same_tensors_as_one_file(make_folder: MakeFolder, weights: dict[str, Any]) -> None:
    folder = make_folder(shards=3)
    found = tensors_of(folder)
    assert found.keys() == weights.keys()
    assert len({tensor.file for tensor in found.values()}) == 3
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.to_float32(), weights[name])
    assert read_model_facts(folder).weight_bytes == sum(weight.nbytes for weight in weights.values())


def test_a_tensor_outlives_the_iteration(make_folder: MakeFolder, weights: dict[str, Any]) -> None:
    kept = list(iterate_tensors(make_folder(shards=2)))
    np.testing.assert_array_equal(kept[0].to_float32(), weights[kept[0].name])


def test_a_missing_shard_is_named(make_folder: MakeFolder) -> None:
    folder = make_folder(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: is missing"):
        read_model_facts(folder)


def test_a_tensor_that_the_index_promises_and_its_shard_lacks_is_named(make_folder: MakeFolder) -> None:
    folder = make_folder(shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        read_model_facts(folder)
    assert caught.value.tensor == "model.extra.weight"
    assert str(caught.value.file).endswith("model-00001-of-00002.safetensors")


def test_a_tensor_in_two_shards_is_named(make_folder: MakeFolder) -> None:
    folder = make_folder(shards=2)
    first, second = (folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    second.write_bytes(first.read_bytes())
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = [name for name, shard in content["weight_map"].items() if shard == first.name]
    content["weight_map"] = {names[0]: first.name, names[1]: second.name}
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"is in model-00001-of-00002.safetensors too"):
        read_model_facts(folder)


@pytest.mark.parametrize(
    "shard", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", "", 7, None]
)
def test_shard_names_cannot_leave_the_folder(make_folder: MakeFolder, shard: Any) -> None:
    folder = make_folder(shards=2)
    (folder.parent / "other.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {FIRST: shard}}))
    with pytest.raises(CheckpointError, match=r"index.json: tensor .*is not the name of a .safetensors file"):
        read_model_facts(folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_map_is_refused(make_folder: MakeFolder, weight_map: Any) -> None:
    folder = make_folder(shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="weight_map must map tensors to files"):
        read_model_facts(folder)


def test_a_truncated_file_names_file_and_tensor(make_folder: MakeFolder) -> None:
    folder = make_folder()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated") as caught:
        read_model_facts(folder)
    assert caught.value.file == str(file)
    header, data = header_of(file)
    assert header[caught.value.tensor]["data_offsets"][1] == len(data) + 1


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [2, 4]}, "needs 32"),
        ({"shape": [-2, -3]}, "shape must be"),
        ({"shape": [2, 3.0]}, "shape must be"),
        ({"shape": [True, 6]}, "shape must be"),
        ({"shape": [2**62, 2**62]}, "needs"),
        ({"shape": [2**80]}, "shape must be"),
        ({"shape": [1] * 100}, "shape must be"),
        ({"shape": "6"}, "shape must be"),
        ({"shape": None}, "shape must be"),
        ({"data_offsets": [24, 0]}, "data_offsets must be"),
        ({"data_offsets": [0]}, "data_offsets must be"),
        ({"data_offsets": [-24, 0]}, "data_offsets must be"),
        ({"data_offsets": [0, 2**70]}, "data_offsets must be"),
        ({"data_offsets": [0, 48], "shape": [4, 3]}, "truncated"),
        ({"dtype": 3}, "dtype must be"),
        ({"dtype": None}, "dtype must be"),
        ({"dtype": "Q9"}, "no data type 'Q9'"),
    ],
)
def test_a_malformed_entry_names_the_tensor(make_folder: MakeFolder, change: dict[str, Any], message: str) -> None:
    folder = make_folder()
    write_header(folder / "model.safetensors", json.dumps({"w": ENTRY | change}), bytes(24))
    with pytest.raises(ModelError, match=message) as caught:
        read_model_facts(folder)
    assert "tensor 'w'" in str(caught.value)


def test_control_the_unchanged_entry_is_read(make_folder: MakeFolder) -> None:
    folder = make_folder()
    write_header(folder / "model.safetensors", json.dumps({"w": ENTRY}), bytes(24))
    assert read_model_facts(folder).weight_bytes == 24


@pytest.mark.parametrize("metadata", [7, "x", [], {"format": 7}, {"format": {"a": "b"}}])
def test_metadata_of_another_form_are_refused(make_folder: MakeFolder, metadata: Any) -> None:
    file = make_folder() / "model.safetensors"
    write_header(file, json.dumps({"__metadata__": metadata, "w": ENTRY}), bytes(24))
    with pytest.raises(CheckpointError, match="__metadata__ must map names to texts"):
        read_model_facts(file.parent)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_control_metadata_of_the_formats_form_are_taken(make_folder: MakeFolder, metadata: Any) -> None:
    file = make_folder() / "model.safetensors"
    write_header(file, json.dumps({"__metadata__": metadata, "w": ENTRY}), bytes(24))
    assert read_model_facts(file.parent).weight_bytes == 24


def test_overlapping_tensors_are_refused(make_folder: MakeFolder) -> None:
    folder = make_folder()
    header = {"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 36]}}
    write_header(folder / "model.safetensors", json.dumps(header), bytes(36))
    with pytest.raises(CheckpointError, match="tensor 'b': its data overlaps that of tensor 'a'"):
        read_model_facts(folder)


@pytest.mark.parametrize(("offsets", "size"), [([4, 28], 28), ([0, 24], 28)])
def test_bytes_of_no_tensor_are_refused(make_folder: MakeFolder, offsets: list[int], size: int) -> None:
    folder = make_folder()
    header = json.dumps({"a": ENTRY | {"data_offsets": offsets}})
    write_header(folder / "model.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=r"4 bytes .* belong to no tensor"):
        read_model_facts(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"w": 1, "w": 2}', "'w' stands twice"),
        ("[]", "not a JSON object"),
        ("{", "malformed"),
        ('{"w": [' + "[" * 20000, "malformed"),
        ('{"w": ' + "9" * 10000 + "}", "malformed"),
        ('{"w": 5}', "is not a JSON object"),
        ('{"": {}}', "name has 0 characters"),
        (json.dumps({"w" * 600: ENTRY}), "name has 600 characters"),
    ],
)
def test_a_malformed_header_is_refused(make_folder: MakeFolder, header: str, message: str) -> None:
    folder = make_folder()
    write_header(folder / "model.safetensors", header, bytes(24))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_model_facts(folder)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("raw", [b"", b"\x00" * 7, b"\xff" * 8, struct.pack("<Q", 100) + b"{}", b"PK\x03\x04" * 20])
def test_a_file_that_is_no_safetensors_is_refused(make_folder: MakeFolder, raw: bytes) -> None:
    folder = make_folder()
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_model_facts(folder)


@pytest.mark.parametrize("type_name", ["I32", "F64", "F8_E4M3", "U8", "BOOL"])
def test_other_data_types_are_refused_by_name(make_folder: MakeFolder, type_name: str) -> None:
    folder = make_folder()
    sizes = {"I32": 4, "F64": 8}
    entry = {"dtype": type_name, "shape": [6], "data_offsets": [0, 6 * sizes.get(type_name, 1)]}
    write_header(folder / "model.safetensors", json.dumps({"w": entry}), bytes(6 * sizes.get(type_name, 1)))
    with pytest.raises(UnsupportedError, match=rf"tensor 'w': type {type_name} .*supported: F32, F16, BF16"):
        read_model_facts(folder)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.mlp.up_proj.qweight", "GPTQ or AWQ"),
        ("model.layers.0.mlp.up_proj.weight_packed", "compressed-tensors or FP8"),
        ("model.layers.0.mlp.up_proj.weight_scale", "compressed-tensors or FP8"),
        ("model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
    ],
)
def test_quantized_tensors_are_refused_by_name(make_folder: MakeFolder, name: str, kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"quantized by {kind}, and config.json's quantization_config does not"):
        read_model_facts(make_folder(weights={name: np.zeros(4, np.float32)}))


def test_pickled_weights_are_refused_with_the_reason(make_folder: MakeFolder) -> None:
    folder = make_folder()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"pickled weights only \(pytorch_model.bin\).*runs code"):
        read_model_facts(folder)


def test_a_folder_of_gguf_files_says_to_give_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"give the file as MODEL: .*m.gguf"):
        read_model_facts(tmp_path)


def test_a_folder_without_weights_says_what_is_expected(make_folder: MakeFolder) -> None:
    folder = make_folder()
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors.*is expected; found: adapter_model.safetensors"):
        read_model_facts(folder)


def test_an_empty_folder_and_no_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: is missing"):
        read_model_facts(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        read_model_facts(tmp_path / "nothing")


def mutate(raw: bytes, data: st.DataObject, header_length: int) -> bytes:
    """One fault: a cut, a changed byte or a huge number in the header, or bytes of noise."""
    kind = data.draw(st.sampled_from(["cut", "byte", "length", "noise"]))
    if kind == "cut":
        return raw[: data.draw(st.integers(0, len(raw) - 1))]
    if kind == "length":
        return struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1))) + raw[8:]
    at = data.draw(st.integers(0, header_length))
    noise = data.draw(st.binary(min_size=1, max_size=1 if kind == "byte" else 16))
    return raw[:at] + noise + raw[at + len(noise) :]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_model_error_or_harmless(
    make_folder: MakeFolder, load_guarded: Callable[[Path], ModelError | None], data: st.DataObject
) -> None:
    folder = make_folder()
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    header_length = 8 + struct.unpack("<Q", raw[:8])[0]
    damaged = mutate(raw, data, header_length)
    file.write_bytes(damaged)
    error = load_guarded(folder)
    assert error is not None or len(damaged) == len(raw)
