"""The gate of a gated MLP."""

import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = ["silu_and_mul"]


@op
def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once. x: [rows, 2 × size], gate first, then up → [rows, size]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
