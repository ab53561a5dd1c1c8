"""A weight matrix in the form that a provider's products read it in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = ["PackedWeight", "Weight", "pack_weight", "plain"]


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
def pack_weight(weight: Tensor, gated: bool = False) -> Weight:
    """[out_size, in_size], once it is loaded → what ``linear``, ``logits`` and ``embedding`` are given instead, or with
    ``gated`` what ``gated_linear`` is. The definitions read a matrix as it is."""
    return weight


def plain(weight: Weight) -> Tensor:
    """The matrix, for the definitions: what a provider has packed only that provider reads."""
    if isinstance(weight, PackedWeight):
        raise TypeError("a weight that was packed for native kernels was given to a torch definition")
    return weight
