"""Rotary position embedding from a table of cosines and sines: a part of the definition of ``rotary_and_cache``."""

import torch
from torch import Tensor

__all__ = ["rotary_embedding"]


def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates channel i together with channel i + rotary_dim/2, in float32, rounded once.

    Args:
        positions: [num_tokens] int64.
        query: [num_tokens, num_heads, head_size].
        key: [num_tokens, num_kv_heads, head_size].
        cos_sin: [max_position, rotary_dim] float32: the cosines of a position's angles, then their sines. Channels
            from rotary_dim on pass unchanged.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)
