"""Numbers → blocks, by the chosen level's kernel."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo import _native
from octavo.kernels.native.formats import format_of
from octavo.kernels.native.tensors import TYPES
from octavo.kernels.quantize import NOT_KEPT

__all__ = ["quantize"]


def quantize(type_name: str, rows: Tensor) -> npt.NDArray[np.uint8]:
    if rows.dtype not in TYPES:
        rows = rows.float()
    rows = rows.contiguous()
    count, in_size = rows.shape
    number, span = format_of(type_name)
    blocks = np.empty(count * _native.file_row_bytes(number, span, in_size), np.uint8)
    if not _native.quantize(TYPES[rows.dtype], rows.data_ptr(), number, blocks.ctypes.data, count, in_size):
        raise ValueError(NOT_KEPT)
    return blocks
