"""Matrix product with a weight matrix."""

import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = ["linear"]


@op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, accumulated in float32. x: [rows, in]; weight: [out, in]; bias: [out]."""
    return torch.nn.functional.linear(x, weight, bias)
