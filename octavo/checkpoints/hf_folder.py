"""A model folder in Hugging Face form: which weight files it has, what they hold, and its small JSON files."""

import re
from pathlib import Path
from typing import Any

import msgspec

from octavo.checkpoints.json_file import read_json, read_json_object
from octavo.checkpoints.safetensors_file import read_safetensors_entries
from octavo.checkpoints.tensor_entry import TensorEntry, shown
from octavo.errors import CheckpointError, ModelError, UnsupportedError

__all__ = ["check_readable", "read_config", "read_generation_config", "read_tokenizer_eos_id", "read_weight_files"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_TOKENIZER_BYTES = 1 << 28

# What the tensors of quantized checkpoints are called → the format.
_QUANTIZED = re.compile(
    r"\.(?:(?P<GPTQ_or_AWQ>qweight|qzeros|g_idx|scales)"
    r"|(?P<compressed_tensors_or_FP8>weight_packed|weight_scale|weight_scale_inv|weight_zero_point|input_scale)"
    r"|(?P<bitsandbytes>absmax|quant_map|SCB|quant_state\.[^.]+))$"
)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerJson(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def read_config(folder: Path) -> dict[str, Any]:
    """config.json."""
    path = folder / "config.json"
    if path.is_file():
        return read_json_object(path)
    gguf = _names(folder, (".gguf",))
    if gguf:
        raise ModelError(f"{folder} holds GGUF files only; give the file as MODEL: {folder / gguf[0]}")
    raise CheckpointError("is missing; a model folder in Hugging Face form is expected", file=str(path))


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, or {} where there is none."""
    path = folder / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


def read_tokenizer_eos_id(folder: Path) -> int | None:
    """The id of the end-of-sequence token that tokenizer_config.json names: chat models end their turns with it even
    where config.json names another."""
    settings, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not settings.is_file() or not vocabulary.is_file():
        return None
    token = read_json(settings, dict[str, Any]).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    added = read_json(vocabulary, _TokenizerJson, _MAX_TOKENIZER_BYTES).added_tokens
    return next((entry.id for entry in added if entry.content == token), None)


def read_weight_files(folder: Path) -> list[tuple[Path, list[TensorEntry]]]:
    """(file, its tensors) for each weight file. Names are unique.

    Raises:
        CheckpointError: no weights, or files and index that do not agree.
        UnsupportedError: pickled weights.
    """
    if (folder / _SINGLE).is_file():
        files = [(folder / _SINGLE, read_safetensors_entries(folder / _SINGLE))]
    elif (folder / _INDEX).is_file():
        files = _read_shards(folder)
    else:
        raise _no_weights(folder)
    seen: dict[str, Path] = {}
    for path, entries in files:
        for entry in entries:
            if entry.name in seen:
                raise CheckpointError(f"is in {seen[entry.name].name} too", file=str(path), tensor=entry.name)
            seen[entry.name] = path
    return files


def _read_shards(folder: Path) -> list[tuple[Path, list[TensorEntry]]]:
    index = folder / _INDEX
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"weight_map must map tensors to files, got {shown(weight_map)}", file=str(index))
    expected: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[\w.+-]+\.safetensors", shard, re.ASCII):
            raise CheckpointError(
                f"{shown(shard)} is not the name of a .safetensors file of this folder", file=str(index), tensor=tensor
            )
        expected.setdefault(shard, []).append(tensor)
    files = []
    for shard, tensors in sorted(expected.items()):
        path = folder / shard
        if not path.is_file():
            raise CheckpointError(f"is missing; {_INDEX} names it for {len(tensors)} tensors", file=str(path))
        entries = read_safetensors_entries(path)
        present = {entry.name for entry in entries}
        missing = next((tensor for tensor in tensors if tensor not in present), None)
        if missing is not None:
            raise CheckpointError(f"is missing; {_INDEX} says it is here", file=str(path), tensor=missing)
        files.append((path, entries))
    return files


def check_readable(entry: TensorEntry, path: Path) -> None:
    """Raises UnsupportedError for a tensor that belongs to a quantized weight, or is of a type that octavo cannot
    read."""
    quantized = _QUANTIZED.search(entry.name)
    if quantized:
        kind = str(quantized.lastgroup).replace("_", " ").replace("compressed tensors", "compressed-tensors")
        raise UnsupportedError(
            f"{path}: tensor {entry.name!r} belongs to a weight quantized by {kind}, and config.json's "
            "quantization_config does not say so"
        )
    if entry.type.dequantize is None:
        raise UnsupportedError(
            f"{path}: tensor {entry.name!r}: type {entry.type.name} is not read yet; supported: F32, F16, BF16"
        )


def _no_weights(folder: Path) -> ModelError:
    pickles = _names(folder, _PICKLES)
    if pickles:
        return UnsupportedError(
            f"{folder} holds pickled weights only ({pickles[0]}); octavo reads safetensors and GGUF, since loading a "
            "pickle runs code"
        )
    others = _names(folder, (".safetensors", ".gguf"))
    found = f"; found: {', '.join(others[:3])}" if others else ""
    return CheckpointError(f"no weights: {_SINGLE} or {_INDEX} is expected{found}", file=str(folder))


def _names(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=str(folder)) from error
