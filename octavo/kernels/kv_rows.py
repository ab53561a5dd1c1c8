"""Rows of a KV cache: what is kept of a token's key, or of its value, in one head.

Either its channels as they are, or 8 bits of each and a factor: ``head_size`` codes, and the 4 bytes of a float32. A
channel is its code times the factor. Codes are int8, or e4m3fn (4 bits of exponent, 3 of mantissa). A row without a
channel above 1e-30 is zero; one with a NaN or an infinity reads as NaN.
"""

import torch
from torch import Tensor

__all__ = ["FACTOR_BYTES", "head_size_of", "keep_rows", "widen_rows"]

FACTOR_BYTES = 4
# The largest code's value.
_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_LEAST = 1e-30  # what is smaller has no float32 that it can be multiplied by to reach the largest code


def head_size_of(kv_cache: Tensor) -> int:
    """Channels of a head."""
    return kv_cache.shape[-1] - FACTOR_BYTES * (kv_cache.dtype in _MOST)


def keep_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[…, head_size] → rows of a cache of ``dtype``, and of that dtype: x itself, or […, head_size + 4]."""
    if dtype not in _MOST:
        return x
    x = x.float()
    most = torch.tensor(_MOST[dtype])
    largest = x.abs().amax(dim=-1, keepdim=True)
    share = torch.where(largest > _LEAST, most / largest, 0.0)
    scaled = (x * share).nan_to_num(nan=0.0)
    codes = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    return torch.cat([codes.view(torch.uint8), _fresh(largest / most).view(torch.uint8)], dim=-1).view(dtype)


def widen_rows(rows: Tensor) -> Tensor:
    """Rows of a cache → […, head_size] float32."""
    if rows.dtype not in _MOST:
        return rows.float()
    factors = _fresh(rows[..., -FACTOR_BYTES:].view(torch.uint8)).view(torch.float32)
    return rows[..., :-FACTOR_BYTES].float() * factors


def _fresh(x: Tensor) -> Tensor:
    """In memory of its own, so that it can be seen as another type."""
    return torch.empty(x.shape, dtype=x.dtype).copy_(x)
