"""Penalties, biases, masks and custom processors: what changes a row's logits before temperature.

Work on many rows at once, over (row, token) pairs, so that its cost follows the number of tokens concerned. Each pair
is changed by itself, in double precision, and rounded once.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.logging import init_logger, one_line
from octavo.sample.logits_processor import NamedProcessor
from octavo.sample.metadata import Penalties, RowChanges
from octavo.sample.selection import pairs

__all__ = ["change_logits"]

logger = init_logger(__name__)

# So many pairs at once, more only where one row has more: about ten arrays of them are alive, 40 MiB.
_MOST_PAIRS = 1 << 19
# Failures of processors, by class and kind, that have been logged with their tracebacks.
_seen_failures: set[tuple[str, str]] = set()
_MOST_TRACEBACKS = 64
_LONGEST_LOGGED = 500

_Row = tuple[int, RowChanges]


def change_logits(logits: Tensor, changes: Mapping[int, RowChanges]) -> dict[int, str]:
    """Changes rows of ``logits`` [rows, vocab_size] in place.

    Returns:
        Row → what went wrong in a processor of its own; the row is to fail.
    """
    errors: dict[int, str] = {}
    for group in _groups(list(changes.items())):
        _penalize(logits, [(row, change.penalties) for row, change in group if change.penalties is not None])
        biased = [(row, change) for row, change in group if change.bias_ids.size]
        if biased:
            index = pairs([row for row, _ in biased], [change.bias_ids for _, change in biased])
            bias = torch.from_numpy(np.concatenate([change.bias for _, change in biased]))
            logits[index] = (logits[index].double() + bias).float()
        for row, change in group:
            # Each as wide as the vocabulary: to gather them would only copy.
            if change.forbidden is not None:
                logits[row].masked_fill_(torch.from_numpy(change.forbidden), -torch.inf)
        banned = [(row, change.banned_ids) for row, change in group if change.banned_ids.size]
        if banned:
            logits[pairs([row for row, _ in banned], [ids for _, ids in banned])] = -torch.inf
        for row, change in group:
            for processor in change.processors:
                error = _process(logits[row], processor, change.output_token_ids)
                if error is not None:
                    errors[row] = error
                    break
    return errors


def _groups(rows: list[_Row]) -> Iterator[list[_Row]]:
    """Cuts the rows into groups of a bounded number of pairs."""
    group: list[_Row] = []
    num_pairs = 0
    for row, change in rows:
        if group and num_pairs + change.num_entries > _MOST_PAIRS:
            yield group
            group, num_pairs = [], 0
        group.append((row, change))
        num_pairs += change.num_entries
    if group:
        yield group


def _penalize(logits: Tensor, rows: Sequence[tuple[int, Penalties]]) -> None:
    if not rows:
        return
    index = pairs([row for row, _ in rows], [penalties.ids for _, penalties in rows])
    lengths = [len(penalties.ids) for _, penalties in rows]

    def for_pairs(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values), lengths))

    counts = torch.from_numpy(np.concatenate([penalties.counts for _, penalties in rows]))
    values = logits[index].double()
    repetition = for_pairs([penalties.repetition for _, penalties in rows])
    values = torch.where(values > 0.0, values / repetition, values * repetition)
    values -= for_pairs([penalties.frequency for _, penalties in rows]) * counts
    values -= for_pairs([penalties.presence for _, penalties in rows]) * (counts > 0)
    logits[index] = values.float()


def _process(row: Tensor, processor: NamedProcessor, output_token_ids: NDArray[np.int32]) -> str | None:
    """Lets a custom processor change one row; what it did wrong, if anything."""
    name, process = processor
    try:
        # Both its own: it may keep them, and do with them what it likes.
        changed = process(output_token_ids.tolist(), row.clone())
        if not isinstance(changed, Tensor) or changed.shape != row.shape or changed.dtype != row.dtype:
            return f"logits processor {name} must return {list(row.shape)} float32 logits, got {_described(changed)}"
        if bool(changed.isnan().any()):
            return f"logits processor {name} returned NaN logits"
        row.copy_(changed)
    except (Exception, SystemExit) as error:  # not our code
        message = one_line(f"logits processor {name} failed: {type(error).__name__}: {error}")
        _log_failure(name, error, message)
        return message
    return None


def _log_failure(name: str, error: BaseException, message: str) -> None:
    """With the traceback where it is the first of its kind: clients may bring about as many as they like."""
    kind = (name, type(error).__name__)
    first = kind not in _seen_failures and len(_seen_failures) < _MOST_TRACEBACKS
    if first:
        _seen_failures.add(kind)
    logger.error("%s", message[:_LONGEST_LOGGED], exc_info=error if first else None)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
