"""Rows of a table, by token id."""

import torch
from torch import Tensor

from octavo.kernels.op import op
from octavo.kernels.packed_weight import Weight, plain

__all__ = ["embedding"]


@op
def embedding(token_ids: Tensor, table: Weight, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """``table[token_ids] * scale``, rounded once to ``dtype`` (None: the table's type). token_ids: [num_tokens] int64;
    table: [vocab_size, hidden_size]."""
    rows = torch.index_select(plain(table), 0, token_ids)
    scaled = rows if scale == 1.0 else rows.float() * scale
    return scaled.to(dtype or rows.dtype)
