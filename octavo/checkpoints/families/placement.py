"""From a tensor as it is stored to the one that a model loads: another name, rows in another order, an offset."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Placement", "RowOrder", "unpermuted"]


@dataclass(frozen=True)
class RowOrder:
    """Rows seen as an array of shape ``split`` (its product is the number of rows), with its axes put into the order
    ``axes``. No row shares a quantization block with another, so that rows of any type can be moved as bytes."""

    split: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return math.prod(self.split)

    def apply(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """``data`` (all rows, one after another, 1-D) with its rows in the new order, copied."""
        rows = data.reshape(*self.split, -1)
        return np.ascontiguousarray(rows.transpose(*self.axes, len(self.split))).reshape(-1)


@dataclass(frozen=True)
class Placement:
    """Attributes:

    name: what the model calls the tensor (Hugging Face's name, as a rule).
    rows: how its rows have to be moved, or None.
    offset: what is added to each value; other than 0, the tensor comes as float32.
    flat: the model has a vector where the file has a matrix: one row after the other.
    """

    name: str
    rows: RowOrder | None = None
    offset: float = 0.0
    flat: bool = False


def unpermuted(heads: int, head_dim: int) -> RowOrder:
    """Rows of a Q or K matrix (or bias) whose rotated pairs stand side by side → pairs half a head apart."""
    return RowOrder((heads, head_dim // 2, 2), (0, 2, 1))
