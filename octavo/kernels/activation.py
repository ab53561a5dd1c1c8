"""Activations of MLPs, and the gates of gated ones. Computed in float32, rounded once."""

from typing import Literal

import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = ["GateForm", "GeluForm", "gate", "gelu"]

# The error function itself ("none": no approximation), or its approximation by tanh.
GeluForm = Literal["none", "tanh"]
# Activations of the gate of a gated MLP.
GateForm = Literal["silu", "gelu", "gelu_tanh"]


@op
def gelu(x: Tensor, approximate: GeluForm) -> Tensor:
    """``x * Φ(x)`` with the normal distribution's Φ. x: [rows, size]."""
    return torch.nn.functional.gelu(x.float(), approximate=approximate).to(x.dtype)


def gate(x: Tensor, activation: GateForm) -> Tensor:
    """``activation(gate) * up`` by its definition. x: [rows, 2 × size], gate first, then up → [rows, size]."""
    gates, up = x.float().chunk(2, dim=-1)
    if activation == "silu":
        gates = torch.nn.functional.silu(gates)
    else:
        gates = torch.nn.functional.gelu(gates, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (gates * up).to(x.dtype)
