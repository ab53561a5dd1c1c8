"""Activations of gated MLPs."""

from torch import Tensor, nn

from octavo import kernels

__all__ = ["SiluAndMul"]


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """[rows, 2 × size], gate first, then up → [rows, size]."""
        return kernels.silu_and_mul(x)
