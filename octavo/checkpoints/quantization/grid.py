"""Scales (and zeros) that lie in a grid beside the weight, each for a block of outputs and inputs: one for everything,
one a row, one a group of inputs, one a block."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.checkpoints.quantization.parts import SCALES, Array, Arrays, Parts, as_float32

__all__ = ["ScaleGrid"]


@dataclass(frozen=True)
class ScaleGrid:
    """Attributes:

    shape: of the weight, [out, in].
    rows: outputs that share a number.
    columns: inputs that do.
    """

    shape: tuple[int, int]
    rows: int
    columns: int

    @property
    def size(self) -> tuple[int, int]:
        """Of the grid; the last blocks may be smaller."""
        return -(-self.shape[0] // self.rows), -(-self.shape[1] // self.columns)

    def check(self, parts: Parts, suffix: str, types: tuple[str, ...] = SCALES) -> None:
        """Raises CheckpointError unless the tensor is such a grid. A side of one may be left out."""
        height, width = self.size
        shapes: list[tuple[int, ...]] = [(height, width)]
        if width == 1:
            shapes.append((height,))
        if (height, width) == (1, 1):
            shapes.append(())
        parts.check(suffix, types, *shapes)

    def scales(self, suffix: str) -> Callable[[Arrays, int, int], npt.NDArray[np.float32]]:
        def read(arrays: Arrays, first: int, last: int) -> npt.NDArray[np.float32]:
            return as_float32(self.of_rows(arrays[suffix], first, last))

        return read

    def of_rows(self, numbers: Array, first: int, last: int) -> Array:
        """[rows of the weight, columns of the grid]."""
        found: Array = numbers.reshape(self.size)[np.arange(first, last) // self.rows]
        return found
