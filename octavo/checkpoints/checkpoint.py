"""One checkpoint, opened: its config in normal form and the places of its tensors, whatever the format.

Everything that can be checked without reading the tensors' data has been checked once this exists.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.checkpoints.families import Family, Placement
from octavo.checkpoints.gguf_file import read_gguf_file
from octavo.checkpoints.gguf_model import gguf_config, gguf_placements
from octavo.checkpoints.hf_config import normal_config, stated_dtype, token_ids
from octavo.checkpoints.hf_folder import (
    check_readable,
    read_config,
    read_generation_config,
    read_tokenizer_eos_id,
    read_weight_files,
)
from octavo.checkpoints.json_file import overridden
from octavo.checkpoints.quantization import Parts, Quantization, QuantizedWeight, StoredTensor, read_quantization
from octavo.checkpoints.tensor_entry import TensorEntry
from octavo.checkpoints.tensor_types import READABLE_TYPES
from octavo.errors import CheckpointError, UnsupportedError

__all__ = ["Checkpoint", "PlacedTensor", "open_checkpoint"]

_DTYPE_OF_TYPE = {"F32": "float32", "F16": "float16"}
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True)
class PlacedTensor:
    """Where a tensor lies, and what it is to the model.

    Attributes:
        entry: of the tensor, or of the one with the numbers where a weight is kept in several.
        weight: how those several make it.
    """

    file: Path
    entry: TensorEntry
    placement: Placement
    weight: QuantizedWeight | None = None

    @property
    def stored(self) -> list[StoredTensor]:
        """All tensors that it is read from."""
        return [StoredTensor(self.file, self.entry)] if self.weight is None else self.weight.stored

    @property
    def num_bytes(self) -> int:
        """In the files."""
        return sum(part.entry.num_bytes for part in self.stored)


@dataclass(frozen=True)
class Checkpoint:
    """Attributes as in ModelFacts; ``tensors`` are where they lie, ``files`` those that hold them, ``remarks`` and
    ``costs`` what is to be told when the weights are loaded."""

    path: Path
    format: str
    architecture: str
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    eos_token_ids: list[int]
    dtype: str
    quantization: str
    tensors: list[PlacedTensor]
    files: list[Path]
    remarks: list[str]
    costs: list[str]


def open_checkpoint(path: Path, hf_overrides: dict[str, Any] | None = None) -> Checkpoint:
    """Opens a folder in Hugging Face form or a GGUF file, whose configuration is taken with ``hf_overrides`` merged in.

    Raises:
        ConfigError: overrides that are not plain JSON.
        CheckpointError: a missing, truncated or malformed file.
        UnsupportedError: a format, architecture, type or quantization that octavo does not have.
    """
    if path.is_dir():
        return _open_hf_folder(path, hf_overrides or {})
    if path.is_file():
        return _open_gguf(path, hf_overrides or {})
    raise CheckpointError("no such file or folder", file=str(path))


def _open_hf_folder(folder: Path, overrides: dict[str, Any]) -> Checkpoint:
    config_file = folder / "config.json"
    raw = overridden(read_config(folder), overrides, config_file)
    family, config = normal_config(raw, config_file)
    quantization = read_quantization(config, folder)
    if quantization is not None:
        config = config | {"quantization_config": quantization.settings}
    stated = stated_dtype(raw, config_file)
    files = read_weight_files(folder)
    tensors, remarks = _placed(files, family, config, quantization)
    generation_config = read_generation_config(folder)
    vocab_size = config["vocab_size"]
    eos = token_ids(config.get("eos_token_id"), vocab_size, config_file, "eos_token_id")
    generation_file = folder / "generation_config.json"
    eos += token_ids(generation_config.get("eos_token_id"), vocab_size, generation_file, "eos_token_id")
    eos += token_ids(read_tokenizer_eos_id(folder), vocab_size, folder / "tokenizer_config.json", "eos_token")
    return Checkpoint(
        path=folder,
        format="safetensors",
        architecture=family.architecture,
        hf_config=config,
        generation_config=generation_config,
        eos_token_ids=list(dict.fromkeys(eos)),
        dtype=stated or _dtype_of(tensors, folder),
        quantization=quantization.name if quantization else "none",
        tensors=tensors,
        files=[path for path, _ in files],
        remarks=remarks,
        costs=_widened(tensors),
    )


def _open_gguf(path: Path, overrides: dict[str, Any]) -> Checkpoint:
    gguf = read_gguf_file(path)
    config = gguf_config(gguf)
    for entry in gguf.tensors:
        if entry.type.dequantize is None:
            raise UnsupportedError(
                f"{path}: tensor {entry.name!r}: type {entry.type.name} is not read yet; "
                f"supported: {', '.join(READABLE_TYPES)}"
            )
    vocab_size = config["vocab_size"]
    eos = [token for key in _EOS_KEYS for token in token_ids(gguf.metadata.get(key), vocab_size, path, key)]
    eos = list(dict.fromkeys(eos))
    bos_key = "tokenizer.ggml.bos_token_id"
    bos = token_ids(gguf.metadata.get(bos_key), vocab_size, path, bos_key)
    config["bos_token_id"] = bos[0] if bos else None
    config["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    config = overridden(config, overrides, path)
    eos = token_ids(config.get("eos_token_id"), vocab_size, path, "eos_token_id")
    family, config = normal_config(config, path)
    if config.get("quantization_config"):
        raise UnsupportedError(f"{path}: quantization_config: a GGUF file says itself how its weights are quantized")
    tensors = [PlacedTensor(path, entry, placement) for entry, placement in gguf_placements(gguf, config)]
    return Checkpoint(
        path=path,
        format="gguf",
        architecture=family.architecture,
        hf_config=config,
        generation_config={},
        eos_token_ids=eos,
        dtype=_dtype_of(tensors, path),
        quantization="gguf",
        tensors=tensors,
        files=[path],
        remarks=[],
        costs=[],
    )


def _placed(
    files: list[tuple[Path, list[TensorEntry]]],
    family: Family,
    config: dict[str, Any],
    quantization: Quantization | None,
) -> tuple[list[PlacedTensor], list[str]]:
    """(the tensors that a model loads, remarks)."""
    found: list[PlacedTensor] = []
    parts: dict[str, dict[str, StoredTensor]] = {}
    unused = []
    for path, entries in files:
        for entry in entries:
            module, _, suffix = entry.name.rpartition(".")
            if any(re.fullmatch(pattern, entry.name) for pattern in family.ignored):
                continue
            if quantization and suffix in quantization.unused:
                unused.append(entry.name)
            elif quantization and suffix in quantization.suffixes:
                parts.setdefault(module, {})[suffix] = StoredTensor(path, entry)
            else:
                found += _placed_alone(StoredTensor(path, entry), family, config)
    if quantization is None:
        return found, []
    for module, stored in parts.items():
        found += _placed_weight(Parts(module, stored), family, config, quantization)
    remarks = [f"weights quantized by {quantization.summary}", *quantization.notes]
    if unused:
        remarks.append(f"{len(unused)} scales of activations or of the cache are not used; one is {unused[0]}")
    return found, remarks


def _placed_alone(stored: StoredTensor, family: Family, config: dict[str, Any]) -> list[PlacedTensor]:
    """A tensor that is a weight by itself; none where the model has no such part."""
    placement = family.place(stored.entry.name, config)
    if placement is None:
        return []
    check_readable(stored.entry, stored.file)
    return [PlacedTensor(stored.file, stored.entry, placement)]


def _placed_weight(
    parts: Parts, family: Family, config: dict[str, Any], quantization: Quantization
) -> list[PlacedTensor]:
    placement = family.place(f"{parts.module}.weight", config)
    if placement is None:
        return []
    weight = quantization.assemble(parts)
    if weight is None:
        return [each for stored in parts.stored.values() for each in _placed_alone(stored, family, config)]
    main = parts.stored[weight.main]
    return [PlacedTensor(main.file, main.entry, placement, weight)]


def _widened(tensors: list[PlacedTensor]) -> list[str]:
    """A line for each reason why quantized weights do not stay so."""
    found: dict[str, list[QuantizedWeight]] = {}
    for tensor in tensors:
        if tensor.weight is not None and tensor.weight.type == "F32":
            found.setdefault(tensor.weight.why_widened, []).append(tensor.weight)
    return [
        f"{len(weights)} quantized weights are widened while loading: {why}; "
        f"{sum(weight.num_bytes for weight in weights) / 2**20:.1f} MiB in the files, "
        f"{sum(2 * math.prod(weight.shape) for weight in weights) / 2**20:.1f} MiB as 16-bit numbers; "
        f"one is {weights[0].parts.module}"
        for why, weights in found.items()
    ]


def _dtype_of(tensors: list[PlacedTensor], path: Path) -> str:
    """The data type that most bytes are in; quantized weights count as bfloat16."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        dtype = _DTYPE_OF_TYPE.get(tensor.entry.type.name, "bfloat16")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.num_bytes
    if not sizes:
        raise CheckpointError("holds no tensors", file=str(path))
    return max(sizes, key=lambda dtype: sizes[dtype])
