"""Stored blocks of a quantized weight → numbers."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.checkpoints import to_float32
from octavo.kernels.op import op

__all__ = ["dequantize"]


@op
def dequantize(type_name: str, data: npt.NDArray[np.uint8]) -> Tensor:
    """The bytes of whole blocks, 1-D, of a type that checkpoints are read in → their values, 1-D float32. Kernels give
    the same bits."""
    return torch.from_numpy(to_float32(type_name, data))
