"""Reads one weight of a folder and checks that its rows come out the same however they are asked for."""

from pathlib import Path

import numpy as np

from octavo.checkpoints import CheckpointTensor, iterate_tensors

__all__ = ["check", "read"]


def read(folder: Path, module: str) -> CheckpointTensor:
    return next(tensor for tensor in iterate_tensors(folder) if tensor.name == f"{module}.weight")


def check(folder: Path, module: str, shape: tuple[int, ...], kind: str) -> CheckpointTensor:
    """The weight, of that shape and storage type; its rows in pieces that begin anywhere are those of the whole."""
    tensor = read(folder, module)
    assert (tensor.type, tensor.shape) == (kind, shape)
    assert len(tensor.data) == tensor.num_bytes
    assert callable(tensor.source)
    for first, last in [(0, 1), (1, 2), (3, 14), (7, shape[0]), (shape[0] - 1, shape[0])]:
        rows = tensor.data.reshape(shape[0], -1)[first:last]
        np.testing.assert_array_equal(tensor.source(first, last), rows.reshape(-1))
    return tensor
