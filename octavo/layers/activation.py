"""Activations of MLPs, by their Hugging Face names."""

from torch import Tensor, nn

from octavo import kernels
from octavo.errors import UnsupportedError

__all__ = ["Gelu", "activation", "gate_form"]

# Several names of the same function. gelu_new and gelu_fast are older ways to write the approximation.
_GELU: dict[str, kernels.GeluForm] = {
    "gelu": "none",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
}
_GATES: dict[str, kernels.GateForm] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


class Gelu(nn.Module):
    def __init__(self, approximate: kernels.GeluForm) -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """[rows, size] → the same shape."""
        return kernels.gelu(x, self.approximate)


def gate_form(name: str) -> kernels.GateForm:
    """The activation of a gated MLP's gate.

    Raises:
        UnsupportedError: there is no such activation.
    """
    if name in _GATES:
        return _GATES[name]
    raise UnsupportedError(f"hidden_act {name!r} is not supported; supported: {', '.join(_GATES)}")


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
