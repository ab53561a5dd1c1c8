"""What octavo read from a damaged checkpoint that it took, against the formats' own libraries over the same files."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

from octavo.checkpoints import iterate_tensors, read_gguf_metadata

__all__ = ["difference"]


def difference(model: Path) -> str | None:
    """What is not the same, in words."""
    try:
        return _gguf_difference(model) if model.is_file() else _folder_difference(model)
    except Exception as error:
        return f"the library refuses what octavo takes: {type(error).__name__}: {error}"


def _folder_difference(folder: Path) -> str | None:
    expected: dict[str, tuple[tuple[int, ...], bytes]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                tensor = opened.get_tensor(name)
                expected[name] = tuple(tensor.shape), _sorted(tensor.reshape(-1).view(torch.uint8).numpy())
    values = set(expected.values())
    for tensor in iterate_tensors(folder):
        if callable(tensor.source):
            continue  # made from several tensors
        found = tuple(tensor.shape), _sorted(tensor.data)
        # Some families have names of their own, and rows in an order of their own.
        if found != expected[tensor.name] if tensor.name in expected else found not in values:
            return f"tensor that is not in the file: {tensor.name}"
    return None


def _gguf_difference(path: Path) -> str | None:
    reader = gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    metadata = read_gguf_metadata(path)
    keys = [
        key
        for key in expected.keys() | metadata.keys()
        if repr(_plain(expected.get(key))) != repr(_plain(metadata.get(key)))
    ]
    if keys:
        return f"metadata that differ: {keys}"
    # Rows of Q and K are put into another order: of a tensor's bytes only the order may be another one.
    theirs = {(item.tensor_type.name, _shape(item), _sorted(item.data)) for item in reader.tensors}
    norms_are_offset = str(metadata.get("general.architecture")).startswith("gemma")
    for tensor in iterate_tensors(path):
        if norms_are_offset and tensor.name.endswith("norm.weight"):
            continue
        if (tensor.type, tuple(tensor.shape), _sorted(tensor.data)) not in theirs:
            return f"tensor that is not in the file: {tensor.name}"
    return None


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _sorted(data: Any) -> bytes:
    return np.sort(np.ascontiguousarray(data).view(np.uint8).reshape(-1)).tobytes()


def _plain(value: Any) -> Any:
    """Python's own numbers."""
    return [_plain(item) for item in value] if isinstance(value, list) else getattr(value, "tolist", lambda: value)()
