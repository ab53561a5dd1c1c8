"""Activations of MLPs, by their Hugging Face names."""

from torch import Tensor, nn

from octavo import kernels
from octavo.errors import UnsupportedError

__all__ = ["Gelu", "GeluAndMul", "SiluAndMul", "activation", "gated_activation"]

# Several names of the same function. gelu_new and gelu_fast are older ways to write the approximation.
_SILU = ("silu", "swish")
_GELU: dict[str, kernels.GeluForm] = {
    "gelu": "none",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
}


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """[rows, 2 × size], gate first, then up → [rows, size]."""
        return kernels.silu_and_mul(x)


class GeluAndMul(nn.Module):
    def __init__(self, approximate: kernels.GeluForm) -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 2 × size], gate first, then up → [rows, size]."""
        return kernels.gelu_and_mul(x, self.approximate)


class Gelu(nn.Module):
    def __init__(self, approximate: kernels.GeluForm) -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """[rows, size] → the same shape."""
        return kernels.gelu(x, self.approximate)


def gated_activation(name: str) -> nn.Module:
    """The gate of a gated MLP.

    Raises:
        UnsupportedError: there is no such activation.
    """
    if name in _SILU:
        return SiluAndMul()
    if name in _GELU:
        return GeluAndMul(_GELU[name])
    raise UnsupportedError(f"hidden_act {name!r} is not supported; supported: {', '.join([*_SILU, *_GELU])}")


def activation(name: str) -> nn.Module:
    """The activation of an MLP without a gate.

    Raises:
        UnsupportedError: there is no such activation.
    """
    if name in _GELU:
        return Gelu(_GELU[name])
    raise UnsupportedError(
        f"hidden_act {name!r} of an MLP without a gate is not supported; supported: {', '.join(_GELU)}"
    )
