"""A weight matrix in the form that a provider's products read it in."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = [
    "MergedWeight",
    "PackedWeight",
    "Weight",
    "empty_weight",
    "fill_blocks",
    "fill_rows",
    "filled",
    "filled_bytes",
    "keeps",
    "pack_blocks",
    "pack_weight",
    "plain",
    "widened_in_products",
]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Attributes:

    data: [bytes] uint8, in the provider's own order.
    shape: (out_size, in_size).
    dtype: of what goes into its products, and of the numbers in it where they are not quantized.
    gated: the first half of the outputs are gates, and lie beside the second half's, which they belong to.
    kept_as: how checkpoints name the quantized type whose numbers it keeps (``"Q4_1"``); empty: numbers of ``dtype``.
    coded: these numbers are there in fewer bits, exactly; nothing can be filled in any more.
    half_scale: of a quantized matrix that becomes bfloat16 while it is multiplied (csrc/cpu/quantized_lines.hpp): what
        brings its weights into half precision's range; 0: its integers are multiplied.
    input_order: [in_size] int32, of a quantized matrix whose columns are in another order: the input that each is. What
        is multiplied with it is put into that order first. None: as they are.
    """

    data: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    gated: bool = False
    kept_as: str = ""
    coded: bool = False
    half_scale: float = 0.0
    input_order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MergedWeight:
    """Weights that see the same input, each kept in its own way: their outputs follow one another. ``linear`` takes it.

    Attributes:
        parts: at least two.
    """

    parts: tuple[PackedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype


# What linear, logits and embedding take: the matrix itself, or what the same provider packed it into.
Weight = Tensor | PackedWeight | MergedWeight


@op
def keeps(type_name: str) -> bool:
    """Whether products compute with numbers of this quantized type as they are. The definitions do not: what is
    quantized is widened for them."""
    return False


@op
def empty_weight(
    shape: tuple[int, int],
    dtype: torch.dtype,
    gated: bool = False,
    kept_as: str = "",
    input_order: Tensor | None = None,
) -> Weight:
    """Memory for a weight matrix, (out_size, in_size), in the form that ``linear``, ``logits`` and ``embedding`` are
    given, or with ``gated`` that of ``gated_linear``; ``fill_rows`` fills it. The definitions read it as it is.

    Args:
        kept_as: a quantized type that the provider ``keeps``; then ``fill_blocks`` fills it.
        input_order: [in_size] int32, of a quantized type: the input that each column of its blocks is. None: they are
            in order.
    """
    return torch.empty(shape, dtype=dtype)


@op
def fill_rows(weight: Weight, first_row: int, rows: Tensor) -> None:
    """Puts rows, [count, in_size] of any floating type, into their place. Several threads may fill different rows."""
    plain(weight)[first_row : first_row + len(rows)] = rows


@op
def fill_blocks(weight: Weight, first_row: int, data: npt.NDArray[np.uint8]) -> None:
    """Puts rows of blocks, as checkpoints have them (1-D), into their place in a weight of the same quantized type.
    Several threads may fill different rows."""
    raise TypeError("the definitions keep no quantized weights")


@op
def filled(weight: Weight) -> Weight:
    """The same matrix, all of whose rows are there, in the form that is read fastest."""
    return weight


@op
def filled_bytes(shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Bytes of such a matrix when it is ``filled``: what a product reads."""
    return math.prod(shape) * dtype.itemsize


@op
def widened_in_products(weight: Weight) -> Weight:
    """The same quantized matrix, all of whose rows are there, to be widened to bfloat16 while it is multiplied: many
    rows are faster and what goes into products is not rounded to 8 bits; one row is slower. The matrix itself where the
    provider cannot, or it is no such matrix."""
    return weight


def pack_weight(weight: Tensor, gated: bool = False) -> Weight:
    """A whole matrix as ``empty_weight``, ``fill_rows`` and ``filled`` make it."""
    packed = empty_weight((weight.shape[0], weight.shape[1]), weight.dtype, gated)
    fill_rows(packed, 0, weight)
    return filled(packed)


def pack_blocks(
    type_name: str,
    data: npt.NDArray[np.uint8],
    shape: tuple[int, int],
    dtype: torch.dtype,
    gated: bool = False,
    input_order: Tensor | None = None,
) -> Weight:
    """A whole quantized matrix as ``empty_weight`` and ``fill_blocks`` make it."""
    packed = empty_weight(shape, dtype, gated, type_name, input_order)
    fill_blocks(packed, 0, data)
    return packed


def plain(weight: Weight) -> Tensor:
    """The matrix, for the definitions: what a provider has packed only that provider reads."""
    if not isinstance(weight, Tensor):
        raise TypeError("a weight that was packed for native kernels was given to a torch definition")
    return weight
