"""Linear layers. Weights that see the same input are merged into one, so that one product serves them all.

The names say how a weight is cut when a model is spread over devices; with one device nothing is cut.
"""

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.layers.activation import gate_form
from octavo.layers.parameter import ShardId, WeightParameter

__all__ = ["GatedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear"]


class _Linear(nn.Module):
    """weight: [out, in], bias: [out] or None; both with the same shards."""

    def __init__(
        self, in_size: int, shards: dict[ShardId, int], bias: bool, dtype: torch.dtype, *, gated: bool = False
    ) -> None:
        super().__init__()
        out_size = sum(shards.values())
        self.weight = WeightParameter((out_size, in_size), dtype, shards, matrix=True, gated=gated)
        self.bias = WeightParameter((out_size,), dtype, shards) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] → [rows, out]."""
        return kernels.linear(x, self.weight.packed, self.bias)


class QKVParallelLinear(_Linear):
    """Query, key and value projections in one. Shards ``"q"``, ``"k"``, ``"v"``, in the output's order."""

    def __init__(
        self, hidden_size: int, head_size: int, num_heads: int, num_kv_heads: int, *, bias: bool, dtype: torch.dtype
    ) -> None:
        q_size, kv_size = num_heads * head_size, num_kv_heads * head_size
        super().__init__(hidden_size, {"q": q_size, "k": kv_size, "v": kv_size}, bias, dtype)
        self.head_size = head_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads

    def forward_split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(query, key, value), each [rows, its heads, head_size]: views of one product."""
        heads = self(x).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_size)
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return query, key, value


class GatedColumnParallelLinear(_Linear):
    """Gate and up projections of a gated MLP in one, with the gate's activation: ``activation(gate) * up``. Shards 0
    (gate) and 1 (up).

    Args:
        activation: its Hugging Face name.
    """

    def __init__(self, in_size: int, out_size: int, activation: str, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_size, {0: out_size, 1: out_size}, bias, dtype, gated=True)
        self.activation = gate_form(activation)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.gated_linear(x, self.weight.packed, self.bias, self.activation)


class RowParallelLinear(_Linear):
    """One projection, back to the hidden size.

    Args:
        residual_multiplier: factor of what is added to the residual.
    """

    def __init__(
        self, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype, residual_multiplier: float = 1.0
    ) -> None:
        super().__init__(in_size, {None: out_size}, bias, dtype)
        self.residual_multiplier = residual_multiplier

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """The residual, [rows, out] float32, to which the projection of x was added."""
        return kernels.linear_add(x, self.weight.packed, self.bias, residual, self.residual_multiplier)
