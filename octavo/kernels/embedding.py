"""Rows of a table, by token id."""

import torch
from torch import Tensor

from octavo.kernels.op import op

__all__ = ["embedding"]


@op
def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """``table[token_ids]``. token_ids: [num_tokens] int64; table: [vocab_size, hidden_size]."""
    return torch.index_select(table, 0, token_ids)
