"""A digest that changes when the weights, or how they are used, do: the root of the prefix cache's hash chains.

Quick for a checkpoint of any size: headers whole, tensor data in samples.
"""

import hashlib
import json

import numpy as np

from octavo.checkpoints.checkpoint import Checkpoint
from octavo.checkpoints.tensor_entry import TensorEntry, map_file

__all__ = ["fingerprint"]

# A fine-tuned model differs in every tensor that it trained, all over it: a few pages of each show it.
_SAMPLES = 4
_SAMPLE_BYTES = 1024


def fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 (hex) over the config, the files' names, sizes and headers, and samples of each tensor's data. The
    folder's own name does not count."""
    digest = hashlib.sha256()
    digest.update(json.dumps([checkpoint.architecture, checkpoint.hf_config], sort_keys=True).encode())
    by_file: dict[str, list[TensorEntry]] = {}
    for tensor in checkpoint.tensors:
        for part in tensor.stored:
            by_file.setdefault(part.file.name, []).append(part.entry)
    for path in sorted(checkpoint.files, key=lambda path: path.name):
        data = map_file(path)
        entries = by_file.get(path.name, [])
        header = min((entry.offset for entry in entries), default=len(data))
        digest.update(json.dumps([path.name, len(data), header]).encode())
        digest.update(data[:header].data)
        for entry in sorted(entries, key=lambda entry: entry.offset):
            for start in _sample_starts(entry.num_bytes):
                end = min(start + _SAMPLE_BYTES, entry.num_bytes)
                digest.update(data[entry.offset + start : entry.offset + end].data)
    return digest.hexdigest()


def _sample_starts(num_bytes: int) -> list[int]:
    """Where samples begin: all of a small tensor, else evenly from its beginning to its end."""
    if num_bytes <= _SAMPLES * _SAMPLE_BYTES:
        return list(range(0, num_bytes, _SAMPLE_BYTES))
    return [int(start) for start in np.linspace(0, num_bytes - _SAMPLE_BYTES, _SAMPLES, dtype=np.int64)]
