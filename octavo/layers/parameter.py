"""A parameter that loads itself: it knows which rows each shard of a merged weight fills, and what is still missing.

The loader only finds the parameter; shapes are checked and types converted here, one tensor at a time, so that no
second copy of the model ever exists.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from octavo.checkpoints import CheckpointTensor

__all__ = ["ShardId", "WeightParameter"]

# "q", "k", "v" of a QKV weight, 0 and 1 of a gate-up weight, None for a weight that comes whole.
ShardId = str | int | None

# Types whose bytes torch reads as they are; all others are dequantized to float32 first.
_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightParameter(nn.Parameter):
    """Args:

    shape: of the whole parameter. Its memory is not initialized.
    dtype: what the checkpoint's type is converted to.
    shards: shard id → rows (dim 0), in order; None: the parameter comes whole.
    """

    shards: dict[ShardId, slice]
    loaded_shards: set[ShardId]

    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, shards: dict[ShardId, int] | None = None) -> Any:
        return super().__new__(cls, torch.empty(shape, dtype=dtype), requires_grad=False)

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, shards: dict[ShardId, int] | None = None) -> None:
        super().__init__()
        self.loaded_shards = set()
        self.shards = {}
        start = 0
        for shard_id, rows in (shards or {None: shape[0]}).items():
            self.shards[shard_id] = slice(start, start + rows)
            start += rows
        if start != shape[0]:
            raise ValueError(f"shards {shards} do not fill {shape[0]} rows")

    @property
    def missing_shards(self) -> list[ShardId]:
        return [shard_id for shard_id in self.shards if shard_id not in self.loaded_shards]

    def weight_loader(self, source: "CheckpointTensor", shard_id: ShardId = None) -> None:
        """Fills the shard's rows.

        Raises:
            CheckpointError: the shard is of another shape, or has been filled before.
        """
        target = self.data[self.shards[shard_id]]
        if tuple(source.shape) != tuple(target.shape):
            raise CheckpointError(
                f"shape {list(source.shape)}, expected {list(target.shape)}", file=source.file, tensor=source.name
            )
        if shard_id in self.loaded_shards:
            raise CheckpointError("is there twice", file=source.file, tensor=source.name)
        target.copy_(_as_torch(source))
        self.loaded_shards.add(shard_id)


def _as_torch(source: "CheckpointTensor") -> Tensor:
    plain = _PLAIN_TYPES.get(source.type)
    if plain is None:
        return torch.from_numpy(source.to_float32())
    return torch.from_numpy(source.data).view(plain).view(source.shape)
