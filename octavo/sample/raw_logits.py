"""The raw logits of rows that are about to be changed: logprobs are of them, and NaN must not hide behind a change.

Where few tokens of a row change, only those are kept; the cost of a change follows the number of tokens it concerns.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.sample.metadata import RowChanges
from octavo.sample.selection import pairs

__all__ = ["RawLogits"]

# Beyond this share of a row a copy of it all is smaller than ids and values.
_FEW = 1 / 8


class RawLogits:
    """What ``changes`` will overwrite in ``logits`` [rows, vocab_size]."""

    def __init__(self, logits: Tensor, changes: Mapping[int, RowChanges]) -> None:
        most = logits.shape[1] * _FEW
        whole: list[int] = []
        self._sparse: list[int] = []
        for row, change in changes.items():
            everything = change.forbidden is not None or change.processors
            (whole if everything or change.num_entries > most else self._sparse).append(row)
        self._rows = torch.tensor(whole, dtype=torch.int64)
        self._whole = logits.index_select(0, self._rows) if whole else None
        if self._sparse:
            self._pairs = pairs(self._sparse, [changes[row].ids for row in self._sparse])
            self._values = logits[self._pairs]

    def broken_rows(self) -> list[int]:
        """Rows with NaN among what is kept."""
        found: list[int] = []
        if self._whole is not None:
            found += self._rows[torch.isnan(self._whole.amax(dim=-1))].tolist()
        if self._sparse:
            found += self._pairs[0][torch.isnan(self._values)].tolist()
        return found

    def restore(self, logits: Tensor) -> None:
        """Undoes the changes."""
        if self._whole is not None:
            logits.index_copy_(0, self._rows, self._whole)
        if self._sparse:
            logits[self._pairs] = self._values
