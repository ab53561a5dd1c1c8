"""Matrix products with a weight matrix, alone and together with what follows them in a decoder layer."""

import torch
from torch import Tensor

from octavo.kernels.activation import GateForm, gate
from octavo.kernels.op import op
from octavo.kernels.packed_weight import Weight, plain

__all__ = ["gated_linear", "linear", "linear_add"]


@op
def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, accumulated in float32. x: [rows, in]; weight: [out, in]; bias: [out]."""
    return torch.nn.functional.linear(x, plain(weight), bias)


@op
def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, multiplier: float = 1.0) -> Tensor:
    """Adds ``(x @ weight.T + bias) * multiplier`` to the residual, [rows, out] float32, where it is, and returns it.
    Kernels do not round the product; the definition rounds it to the type of x."""
    return residual.add_(torch.nn.functional.linear(x, plain(weight), bias), alpha=multiplier)


@op
def gated_linear(x: Tensor, weight: Weight, bias: Tensor | None, activation: GateForm) -> Tensor:
    """``activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)``, in the type of x.

    Args:
        x: [rows, in].
        weight: [2 × size, in], gate first, then up; packed with ``gated=True``.
        bias: [2 × size], likewise.

    Returns:
        [rows, size]. Kernels do not round the products; the definition rounds them to the type of x.
    """
    return gate(torch.nn.functional.linear(x, plain(weight), bias), activation)
