"""What the wrappers of native kernels share: checks of tensors that a kernel is pointed to, and memory for results."""

import torch
from torch import Tensor

from octavo.kernels.arena import empty

__all__ = ["TYPES", "check", "empty", "rows_of"]

# The library's names of types.
TYPES = {torch.float32: 0, torch.bfloat16: 1}


def check(dtype: torch.dtype, shape: tuple[int, ...] | None, **tensors: Tensor | None) -> None:
    """Each of them, where there is one, is of this type and shape (None: of any) and contiguous."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype or (shape is not None and tensor.shape != shape):
            expected = "" if shape is None else f" {shape}"
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype}{expected}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")


def rows_of(x: Tensor) -> Tensor:
    """[rows, …] with rows that are contiguous; their distance is free."""
    size = 1
    for dim in range(x.ndim - 1, 0, -1):
        if x.stride(dim) != size and x.shape[dim] != 1:
            return x.contiguous()
        size *= x.shape[dim]
    return x
