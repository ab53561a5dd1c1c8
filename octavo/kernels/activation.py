"""Activations of MLPs, and the gates of gated ones. Computed in float32, rounded once."""

from typing import Literal

import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = ["GateForm", "GeluForm", "gate", "gelu", "gelu_and_mul", "silu_and_mul"]

# The error function itself ("none": no approximation), or its approximation by tanh.
GeluForm = Literal["none", "tanh"]
# Activations of the gate of a gated MLP.
GateForm = Literal["silu", "gelu", "gelu_tanh"]


@op
def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up``. x: [rows, 2 × size], gate first, then up → [rows, size]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@op
def gelu_and_mul(x: Tensor, approximate: GeluForm) -> Tensor:
    """``gelu(gate) * up``. x: [rows, 2 × size], gate first, then up → [rows, size]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate=approximate) * up).to(x.dtype)


@op
def gelu(x: Tensor, approximate: GeluForm) -> Tensor:
    """``x * Φ(x)`` with the normal distribution's Φ. x: [rows, size]."""
    return torch.nn.functional.gelu(x.float(), approximate=approximate).to(x.dtype)


def gate(x: Tensor, activation: GateForm) -> Tensor:
    """``activation(gate) * up`` by its definition. x: [rows, 2 × size], gate first, then up → [rows, size]."""
    if activation == "silu":
        return silu_and_mul.definition(x)
    return gelu_and_mul.definition(x, "tanh" if activation == "gelu_tanh" else "none")
