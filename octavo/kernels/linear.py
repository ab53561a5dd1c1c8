"""Matrix product with a weight matrix."""

import torch
from torch import Tensor

from octavo.kernels.op import op
from octavo.kernels.packed_weight import Weight, plain

__all__ = ["linear"]


@op
def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, accumulated in float32. x: [rows, in]; weight: [out, in]; bias: [out]."""
    return torch.nn.functional.linear(x, plain(weight), bias)
