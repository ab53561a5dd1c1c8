"""Quantized checkpoints in Hugging Face's forms, one file each: their settings, and the tensors of a weight.

All become rows of blocks of a few types (dequantize_groups.py), so that nothing after this knows where a weight is
from. To read one more form: its file with a ``read(fields) -> Quantization`` and its line in ``METHODS``.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.checkpoints.json_file import Fields, read_json_object
from octavo.checkpoints.quantization import awq, compressed_tensors, fp8, gptq
from octavo.checkpoints.quantization.method import Quantization
from octavo.checkpoints.quantization.parts import Parts, StoredTensor
from octavo.checkpoints.quantization.weight import QuantizedWeight
from octavo.checkpoints.tensor_entry import shown
from octavo.errors import UnsupportedError

__all__ = ["METHODS", "Parts", "Quantization", "QuantizedWeight", "StoredTensor", "read_quantization"]

METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": fp8.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
}

# Files with the settings beside a config.json without them → the method where they name none.
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def read_quantization(config: dict[str, Any], folder: Path) -> Quantization | None:
    """How a model folder's weights are quantized, if they are.

    Args:
        config: the folder's config.json.

    Raises:
        CheckpointError: settings that are missing or wrong.
        UnsupportedError: a method, or a variant of it, that octavo does not have.
    """
    found = _settings(config, folder)
    if found is None:
        return None
    fields, default = found
    name = fields.string("quant_method", default=default)
    if name not in METHODS:
        raise UnsupportedError(
            f"{fields.file}: {fields.where}quant_method: {shown(name)} is not supported; "
            f"supported: {', '.join(METHODS)}, and GGUF files"
        )
    return replace(METHODS[name](fields), settings=fields.values)


def _settings(config: dict[str, Any], folder: Path) -> tuple[Fields, str | None] | None:
    """(settings, the method where they name none)."""
    outer = Fields(config, folder / "config.json")
    for key in ("quantization_config", "compression_config"):
        fields = outer.nested(key)
        if fields is not None and fields.values:
            return fields, "compressed-tensors" if "config_groups" in fields.values else None
    for name, method in _OWN_FILES.items():
        if (folder / name).is_file():
            return Fields(read_json_object(folder / name), folder / name), method
    return None
