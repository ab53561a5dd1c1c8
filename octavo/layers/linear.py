"""Linear layers. Weights that see the same input are merged into one, so that one product serves them all.

The names say how a weight is cut when a model is spread over devices; with one device nothing is cut.
"""

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.layers.parameter import ShardId, WeightParameter

__all__ = ["MergedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear"]


class _Linear(nn.Module):
    """weight: [out, in], bias: [out] or None; both with the same shards."""

    def __init__(self, in_size: int, shards: dict[ShardId, int], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        out_size = sum(shards.values())
        self.weight = WeightParameter((out_size, in_size), dtype, shards)
        self.bias = WeightParameter((out_size,), dtype, shards) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] → [rows, out]."""
        return kernels.linear(x, self.weight.packed, self.bias)

    def finish_loading(self) -> None:
        """Called once, when all weights are there."""
        self.weight.pack()


class QKVParallelLinear(_Linear):
    """Query, key and value projections in one. Shards ``"q"``, ``"k"``, ``"v"``, in the output's order."""

    def __init__(
        self, hidden_size: int, head_size: int, num_heads: int, num_kv_heads: int, *, bias: bool, dtype: torch.dtype
    ) -> None:
        self.q_size = num_heads * head_size
        self.kv_size = num_kv_heads * head_size
        super().__init__(hidden_size, {"q": self.q_size, "k": self.kv_size, "v": self.kv_size}, bias, dtype)

    def forward_split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(query, key, value), each [rows, heads × head_size]."""
        query, key, value = self(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        return query, key, value


class MergedColumnParallelLinear(_Linear):
    """Several projections of the same input in one. Shards 0, 1, …, in the output's order."""

    def __init__(self, in_size: int, out_sizes: list[int], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_size, dict(enumerate(out_sizes)), bias, dtype)


class RowParallelLinear(_Linear):
    """One projection, back to the hidden size."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_size, {None: out_size}, bias, dtype)
