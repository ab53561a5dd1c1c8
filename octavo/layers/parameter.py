"""A parameter that loads itself: it knows which rows each shard of a merged weight fills, and what is still missing.

The loader only finds the parameter; shapes are checked and types converted here, one tensor at a time, so that no
second copy of the model ever exists. Memory is taken when the first shard arrives and has the right shape.
"""

import math
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octavo import kernels
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

    full_shape: of the whole parameter; until a shard is loaded, the tensor itself is empty.
    dtype: what the checkpoint's type is converted to.
    shards: shard id → rows (dim 0), in order; None: the parameter comes whole.
    offset: added to what the checkpoint says, in the parameter's type.

    Attributes:
        packed: a weight matrix in the form that the chosen kernels read it in, once ``pack`` was called. Where that is
            another form, the matrix itself is given up.
    """

    full_shape: tuple[int, ...]
    offset: float
    shards: dict[ShardId, slice]
    loaded_shards: set[ShardId]
    packed: "kernels.Weight"
    _lock: Lock

    def __new__(
        cls,
        full_shape: tuple[int, ...],
        dtype: torch.dtype,
        shards: dict[ShardId, int] | None = None,
        *,
        offset: float = 0.0,
    ) -> Any:
        return super().__new__(cls, torch.empty(0, dtype=dtype), requires_grad=False)

    def __init__(
        self,
        full_shape: tuple[int, ...],
        dtype: torch.dtype,
        shards: dict[ShardId, int] | None = None,
        *,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.offset = offset
        self.packed = self
        self.full_shape = full_shape
        self.loaded_shards = set()
        self.shards = {}
        self._lock = Lock()
        start = 0
        for shard_id, rows in (shards or {None: full_shape[0]}).items():
            self.shards[shard_id] = slice(start, start + rows)
            start += rows

    @property
    def full_nbytes(self) -> int:
        return math.prod(self.full_shape) * self.itemsize

    def pack(self, gated: bool = False) -> None:
        """For a weight matrix, when all shards are there. A second call changes nothing.

        Args:
            gated: ``gated_linear`` will read it.
        """
        if self.packed is self:
            self.packed = kernels.pack_weight(self.data, gated)
            if isinstance(self.packed, kernels.PackedWeight):
                self.data = torch.empty(0, dtype=self.dtype)

    def shard_rows(self, shard_id: ShardId) -> slice:
        """Rows that the shard fills; None: all."""
        return self.shards[shard_id] if shard_id is not None else slice(0, self.full_shape[0])

    def weight_loader(self, source: "CheckpointTensor", shard_id: ShardId = None) -> None:
        """Fills the shard's rows; None fills the whole parameter, merged or not.

        Raises:
            CheckpointError: the shard is of another shape, or has been filled before.
        """
        rows = self.shard_rows(shard_id)
        expected = (rows.stop - rows.start, *self.full_shape[1:])
        if tuple(source.shape) != expected:
            raise CheckpointError(
                f"has shape {list(source.shape)}, expected {list(expected)}", file=source.file, tensor=source.name
            )
        arrived = set(self.shards) if shard_id is None else {shard_id}
        with self._lock:  # shards of one parameter may arrive in several threads
            if arrived & self.loaded_shards:
                raise CheckpointError("is there twice", file=source.file, tensor=source.name)
            self.loaded_shards |= arrived
            if not self.numel():
                self.data = torch.empty(self.full_shape, dtype=self.dtype)
        filled = self.data[rows]
        _fill(filled, source)
        if self.offset:
            filled += self.offset


def _fill(target: Tensor, source: "CheckpointTensor") -> None:
    plain = _PLAIN_TYPES.get(source.type)
    if plain is not None:
        target.copy_(torch.from_numpy(source.data).view(plain).view(source.shape))
        return
    flat = target.view(-1)
    done = 0
    for piece in source.float32_pieces():
        flat[done : done + len(piece)] = torch.from_numpy(piece)
        done += len(piece)
