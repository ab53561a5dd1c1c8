"""Blocks of 32 values; other types are left to the definition."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo import _native
from octavo.kernels.dequantize import dequantize as definition

__all__ = ["dequantize"]

_VALUES = 32
# Name → the library's number, bytes of a block.
_TYPES = {"Q8_0": (0, 34), "Q4_0": (1, 18), "Q4_1": (2, 20), "Q5_0": (3, 22), "Q5_1": (4, 24)}


def dequantize(type_name: str, data: npt.NDArray[np.uint8]) -> Tensor:
    if type_name not in _TYPES:
        return definition.definition(type_name, data)
    number, block_bytes = _TYPES[type_name]
    if len(data) % block_bytes:
        raise ValueError(f"{len(data)} bytes of {type_name} are not whole blocks of {block_bytes}")
    data = np.ascontiguousarray(data)
    values = torch.empty(len(data) // block_bytes * _VALUES)
    _native.dequantize(number, data.ctypes.data, len(data) // block_bytes, values.data_ptr())
    return values
