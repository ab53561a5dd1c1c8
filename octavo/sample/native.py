"""Sampling with the native kernel (``csrc/cpu/sample.cpp``): one call a batch, given the addresses of arrays.

The kernel would read whatever memory it is pointed to, so types and sizes are checked here, and ids by the library.
Rows with custom processors come as copies that the definition has changed; what else changes logits is the kernel's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo import _native
from octavo.sample.logits_changes import change_logits
from octavo.sample.metadata import Penalties, RowChanges, SamplingMetadata
from octavo.sample.output import EMPTY, NAN, SamplerOutput
from octavo.types import PositionLogprobs

__all__ = ["sample", "score"]

_NAN, _EMPTY = 1, 2  # csrc/cpu/sample.hpp, Status
_PARAMETERS = (
    ("temperature", np.float64),
    ("min_p", np.float64),
    ("top_p", np.float64),
    ("top_k", np.int64),
    ("seed", np.int64),
    ("choice_index", np.int64),
    ("output_position", np.int64),
)
_NO_CHANGES = (0,) * 13
_NO_LOGPROBS = (0,) * 5
_NO_PENALTIES = Penalties(ids=np.empty(0, dtype=np.int64), counts=np.empty(0, dtype=np.int64))


def sample(logits: Tensor, metadata: SamplingMetadata, room: NDArray[np.float32]) -> SamplerOutput:
    """What ``Sampler`` gives for them. ``room``: at least as many elements as the rows have that are changed."""
    rows, vocab_size = logits.shape
    # All that is pointed to must live until the kernel has run.
    parameters = [_checked(name, getattr(metadata, name), kind, rows) for name, kind in _PARAMETERS]
    lists = _Lists(metadata.num_logprobs, metadata.logprob_token_ids, vocab_size)
    token_ids, status = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int8)
    changes: list[NDArray[Any]] = []
    errors: dict[int, str] = {}
    if metadata.changes:
        copies = room[: len(metadata.changes) * vocab_size].reshape(-1, vocab_size)
        ready, errors = _run_processors(logits, metadata.changes, copies)
        changes = _flattened(metadata.changes, ready, copies, vocab_size)
    _native.sample(
        *_addressed(logits),
        _addresses(parameters),
        len(metadata.changes),
        _addresses(changes) if changes else _NO_CHANGES,
        lists.addresses,
        _address(token_ids),
        _address(status),
    )
    found = _found_errors(status)
    # A NaN of the model's comes first, whatever a processor made of it.
    errors = found | {row: message for row, message in errors.items() if found.get(row) != NAN}
    if errors:
        token_ids[list(errors)] = -1
    return SamplerOutput(token_ids, lists.read(errors), errors)


def score(logits: Tensor, token_ids: NDArray[np.int64], num_logprobs: NDArray[np.int64]) -> SamplerOutput:
    """What ``Sampler.score`` gives for them."""
    rows, vocab_size = logits.shape
    lists = _Lists(num_logprobs, {}, vocab_size)
    token_ids = _checked("token_ids", token_ids, np.int64, rows)
    status = np.empty(rows, dtype=np.int8)
    _native.score(*_addressed(logits), lists.addresses, _address(token_ids), _address(status))
    errors = _found_errors(status)
    return SamplerOutput(token_ids, lists.read(errors), errors)


class _Lists:
    """Room for the logprobs that are listed, those of all rows behind each other (csrc/cpu/sample.hpp, Logprobs).

    Attributes:
        addresses: of the arrays, for the kernel.
    """

    def __init__(
        self, num_logprobs: NDArray[np.int64], named: Mapping[int, NDArray[np.int64]], vocab_size: int
    ) -> None:
        self._named = named
        self._rows: list[int] = np.flatnonzero(num_logprobs >= 0).tolist()
        self.addresses: tuple[int, ...] = _NO_LOGPROBS
        if not self._rows:
            return
        counts = np.minimum(num_logprobs, vocab_size) + 1
        is_named = np.zeros(len(counts), dtype=bool)
        for row, ids in named.items():
            counts[row], is_named[row] = len(ids) + 1, True
        self._start = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=self._start[1:])
        total = int(self._start[-1])
        self._ids = np.empty(total, dtype=np.int64)
        for row, ids in named.items():
            self._ids[self._start[row] + 1 : self._start[row + 1]] = ids
        self._logprobs = np.empty(total, dtype=np.float32)
        self._ranks = np.empty(total, dtype=np.int64)
        self._is_named = is_named
        self.addresses = _addresses([self._start, is_named, self._ids, self._logprobs, self._ranks])

    def read(self, errors: Mapping[int, str]) -> dict[int, PositionLogprobs]:
        """What the kernel has written, for the rows that asked and did not fail."""
        if not self._rows:
            return {}
        start, ids, logprobs = self._start.tolist(), self._ids.tolist(), self._logprobs.tolist()
        first_ranks = self._ranks[self._start[:-1].clip(max=len(ids) - 1)].tolist()
        found: dict[int, PositionLogprobs] = {}
        for row in self._rows:
            if row in errors:
                continue
            part = slice(start[row], start[row + 1])
            ranks = self._ranks[start[row] + 1 : start[row + 1]].tolist() if row in self._named else []
            found[row] = PositionLogprobs(ids[part], logprobs[part], first_ranks[row], ranks)
        return found


def _run_processors(
    logits: Tensor, changes: Mapping[int, RowChanges], copies: NDArray[np.float32]
) -> tuple[NDArray[np.bool_], dict[int, str]]:
    """Fills in the copies of rows with custom processors: which those are, and what went wrong, by row."""
    ready = np.array([bool(change.processors) for change in changes.values()], dtype=bool)
    errors: dict[int, str] = {}
    if ready.any():
        for index, (row, change) in enumerate(changes.items()):
            if ready[index]:
                copy = torch.from_numpy(copies[index : index + 1])
                copy.copy_(logits[row])
                failed = change_logits(copy, {0: change})
                if failed:
                    errors[row] = failed[0]
    return ready, errors


def _flattened(
    changes: Mapping[int, RowChanges], ready: NDArray[np.bool_], copies: NDArray[np.float32], vocab_size: int
) -> list[NDArray[Any]]:
    """The arrays of csrc/cpu/sample.hpp, Changes, in order."""
    each = list(changes.values())
    penalties = [change.penalties or _NO_PENALTIES for change in each]
    forbidden = [
        0 if change.forbidden is None else _address(_checked("forbidden", change.forbidden, np.bool_, vocab_size))
        for change in each
    ]
    return [
        np.array(list(changes), dtype=np.int64),
        ready,
        copies,
        *_behind_each_other([some.ids for some in penalties], [some.counts for some in penalties]),
        np.array([[some.repetition, some.frequency, some.presence] for some in penalties], dtype=np.float64),
        *_behind_each_other([change.bias_ids for change in each]),
        np.concatenate([change.bias for change in each]).astype(np.float64, copy=False),
        np.array(forbidden, dtype=np.uint64),
        *_behind_each_other([change.banned_ids for change in each]),
    ]


def _behind_each_other(*columns: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Where each part begins, [parts + 1], then the parts of each column in one array."""
    start = np.zeros(len(columns[0]) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in columns[0]], out=start[1:])
    return [start, *(np.concatenate(column).astype(np.int64, copy=False) for column in columns)]


def _found_errors(status: NDArray[np.int8]) -> dict[int, str]:
    if not status.any():
        return {}
    return dict.fromkeys(np.flatnonzero(status == _NAN).tolist(), NAN) | dict.fromkeys(
        np.flatnonzero(status == _EMPTY).tolist(), EMPTY
    )


def _addressed(logits: Tensor) -> tuple[int, int, int, int]:
    """Address, stride and shape."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits are {logits.dtype} with stride {logits.stride()}, expected contiguous float32 rows")
    return logits.data_ptr(), logits.stride(0), *logits.shape


def _checked(name: str, array: NDArray[Any], kind: type[np.generic], size: int) -> NDArray[Any]:
    if array.dtype != kind or array.shape != (size,) or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype} {array.shape}, expected contiguous {np.dtype(kind)} ({size},)")
    return array


def _addresses(arrays: Sequence[NDArray[Any]]) -> tuple[int, ...]:
    return tuple(_address(array) for array in arrays)


def _address(array: NDArray[Any]) -> int:
    found: int = array.ctypes.data
    return found
