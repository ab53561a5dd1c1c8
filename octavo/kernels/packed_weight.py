"""A weight matrix in the form that a provider's products read it in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = ["PackedWeight", "Weight", "empty_weight", "fill_rows", "pack_weight", "plain"]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Attributes:

    data: [bytes] uint8, in the provider's own order.
    shape: (out_size, in_size).
    dtype: of the numbers in it.
    gated: the first half of the outputs are gates, and lie beside the second half's, which they belong to.
    """

    data: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    gated: bool = False


# What linear, logits and embedding take: the matrix itself, or what the same provider packed it into.
Weight = Tensor | PackedWeight


@op
def empty_weight(shape: tuple[int, int], dtype: torch.dtype, gated: bool = False) -> Weight:
    """Memory for a weight matrix, (out_size, in_size), in the form that ``linear``, ``logits`` and ``embedding`` are
    given, or with ``gated`` that of ``gated_linear``; ``fill_rows`` fills it. The definitions read it as it is."""
    return torch.empty(shape, dtype=dtype)


@op
def fill_rows(weight: Weight, first_row: int, rows: Tensor) -> None:
    """Puts rows, [count, in_size] of any floating type, into their place. Several threads may fill different rows."""
    plain(weight)[first_row : first_row + len(rows)] = rows


def pack_weight(weight: Tensor, gated: bool = False) -> Weight:
    """A whole matrix as ``empty_weight`` and ``fill_rows`` make it."""
    packed = empty_weight((weight.shape[0], weight.shape[1]), weight.dtype, gated)
    fill_rows(packed, 0, weight)
    return packed


def plain(weight: Weight) -> Tensor:
    """The matrix, for the definitions: what a provider has packed only that provider reads."""
    if isinstance(weight, PackedWeight):
        raise TypeError("a weight that was packed for native kernels was given to a torch definition")
    return weight
