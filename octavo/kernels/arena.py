"""Memory of a recorded forward: buffers that stay where they are, each with room for the most rows a step may have.

While a forward is recorded, results of kernels are taken from here instead of from torch. A buffer whose tensors are
gone is used again for later results of the same size, so the arena is about as large as what lives at once.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.errors import UnsupportedError

__all__ = ["Arena", "empty"]

_ALIGNMENT = 64
_current: "Arena | None" = None


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory for a kernel's result, [rows, …]: from the arena while a forward is recorded."""
    return torch.empty(shape, dtype=dtype) if _current is None else _current.take(shape, dtype)


class Arena:
    """Args:

    max_rows: that every buffer has room for.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffers: list[NDArray[np.uint8]] = []
        self._free: list[int] = []
        # Which buffer each result of the first recording was in, and how many results this recording has had.
        self._order: list[int] = []
        self._taken = 0
        self._first = True
        self._rows = 0

    @contextmanager
    def used(self, rows: int) -> Iterator[None]:
        """Results of kernels are taken from this arena within a ``with`` block, in which a forward of ``rows`` runs. A
        forward that is recorded again finds each result where it was the first time."""
        global _current
        self._rows, self._taken = rows, 0
        _current = self
        try:
            yield
        finally:
            _current = None
            self._first = False

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """[rows, …]: the beginning of a buffer.

        Raises:
            UnsupportedError: the first dimension is not the forward's rows, so what it depends on is unknown.
        """
        if not shape or shape[0] != self._rows:
            raise UnsupportedError(f"it makes a tensor of shape {list(shape)} for {self._rows} tokens")
        num_bytes = dtype.itemsize * self._max_rows * int(np.prod(shape[1:], dtype=np.int64))
        index = self._find(num_bytes) if self._first else self._same_as_first(num_bytes)
        # The tensor's storage keeps the slice alive, and so does every tensor that shares the storage.
        part = self._buffers[index][:num_bytes]
        if self._first:
            weakref.finalize(part, self._free.append, index)
        with torch._C._DisableTorchDispatch():  # views of its own, which a recorder need not look at
            return torch.from_numpy(part).view(dtype).view(self._max_rows, *shape[1:])[: self._rows]

    def owns(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(buffer.ctypes.data == address for buffer in self._buffers)

    def _find(self, num_bytes: int) -> int:
        """A free buffer of so many bytes, or a new one. In a larger one rows would lie elsewhere than those that were
        there before, and threads could not go on with some rows while others still need that memory."""
        index = next((index for index in self._free if len(self._buffers[index]) == num_bytes), None)
        if index is not None:
            self._free.remove(index)
        else:
            index = len(self._buffers)
            # Zero, and not resident before it is written.
            raw = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
            start = -raw.ctypes.data % _ALIGNMENT
            self._buffers.append(raw[start : start + num_bytes])
        self._order.append(index)
        return index

    def _same_as_first(self, num_bytes: int) -> int:
        index = self._order[self._taken] if self._taken < len(self._order) else -1
        self._taken += 1
        if index == -1 or len(self._buffers[index]) != num_bytes:
            raise UnsupportedError("its results depend on the number of tokens")
        return index
