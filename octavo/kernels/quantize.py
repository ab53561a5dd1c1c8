"""Numbers → blocks of a quantized type, with scales that make the squared error small."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo.kernels.op import op

__all__ = ["NOT_KEPT", "quantize"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

NOT_KEPT = "a number in it is not finite, or larger than 65504, which is half precision's largest"

_GROUP = 32
_STEPS = 3  # of each end of a range that is cut


@op
def quantize(type_name: str, rows: Tensor) -> Bytes:
    """Rows, [count, in_size] of float32, bfloat16 or float16 → their blocks as GGUF files have them, 1-D. The last
    group of a row is filled up with zeros. Kernels give the same bits, whatever the level: every step is one of
    float32, in the order in which it stands here.

    Q8_0: ``d`` is the largest weight / 127, as a half; numbers are rounded by that half.

    Q4_1: of twenty candidates for ``d`` and ``m``, as halves, the one with the least squared error, the first of
    equals. Ten are the range from the smallest to the largest weight with nothing, 1/32 or 2/32 of it cut off below and
    above, and the symmetric one (m = -8 d; the weight farthest from zero is -8). The others are what least squares
    makes of the numbers that each of these gives.

    Raises:
        ValueError: NOT_KEPT; or a type that nothing is quantized to.
    """
    make = _TYPES.get(type_name)
    if make is None:
        raise ValueError(f"nothing is quantized to {type_name}, only to {', '.join(_TYPES)}")
    count, in_size = rows.shape
    padded = np.zeros((count, -(-in_size // _GROUP) * _GROUP), np.float32)
    padded[:, :in_size] = rows.float().numpy()
    if not (np.abs(padded) <= 65504).all():
        raise ValueError(NOT_KEPT)
    with np.errstate(all="ignore"):  # candidates that are no numbers are never better
        return make(np.ascontiguousarray(padded.reshape(-1, _GROUP).T)).reshape(-1)


def _half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _inverse(d: Floats) -> Floats:
    return np.where(d != 0, np.float32(1) / d, np.float32(0))


def _bounded(values: Floats, low: int, high: int) -> Floats:
    """Whole numbers."""
    above: Floats = np.where(values > low, values, np.float32(low))
    return np.rint(np.where(above < high, above, np.float32(high)))


def _halves_of(values: Floats) -> Bytes:
    """[groups] → [groups, 2]."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _q8_0(weights: Floats) -> Bytes:
    """``weights`` [32, groups] → [groups, block bytes]."""
    d = _half(np.abs(weights).max(0) * np.float32(1 / 127))
    q = _bounded(weights * _inverse(d), -127, 127)
    return np.concatenate([_halves_of(d), q.T.astype(np.int8).view(np.uint8)], axis=1)


class _Search:
    """The best scale and offset so far, ``d`` and ``m`` [groups]: weights are ``d q + m``."""

    def __init__(self, weights: Floats) -> None:
        self.weights = weights
        self.d = self.m = np.zeros(weights.shape[1], np.float32)
        self.error = np.full(weights.shape[1], np.inf, np.float32)

    def numbers(self, d: Floats, m: Floats) -> Floats:
        return _bounded((self.weights - m) * _inverse(d), 0, 15)

    def consider(self, d: Floats, m: Floats) -> None:
        """A candidate, and what least squares makes of its numbers."""
        q, m = self._compare(d, m)
        t = self.weights - m
        total_q, total_t = _sum(q), _sum(t)
        deviations = np.float32(_GROUP) * _sum(q * q) - total_q * total_q
        fitted: Floats = np.divide(np.float32(_GROUP) * _sum(t * q) - total_q * total_t, deviations)
        rest: Floats = np.divide(total_t - fitted * total_q, np.float32(_GROUP))
        self._compare(fitted, m + rest)

    def _compare(self, d: Floats, m: Floats) -> tuple[Floats, Floats]:
        """(numbers of the rounded candidate, its offset)."""
        d, m = _half(d), _half(m)
        q = self.numbers(d, m)
        off = (q * d + m) - self.weights
        error = _sum(off * off)
        better = error < self.error
        self.d, self.m = np.where(better, d, self.d), np.where(better, m, self.m)
        self.error = np.where(better, error, self.error)
        return q, m


def _sum(values: Floats) -> Floats:
    """Over the group, one after the other."""
    total = np.zeros(values.shape[1], np.float32)
    for each in values:
        total = total + each
    return total


def _q4_1(weights: Floats) -> Bytes:
    """As `_q8_0`."""
    search = _Search(weights)
    low, high = weights.min(0) + np.float32(0), weights.max(0) + np.float32(0)  # -0 becomes 0
    for below in range(_STEPS):
        for above in range(_STEPS):
            share = np.float32(1 - below / 32 - above / 32) / np.float32(15)
            search.consider((high - low) * share, low + (high - low) * np.float32(below / 32))
    d = _half(np.where(high < -low, low, high) * np.float32(-1 / 8))
    search.consider(d, d * np.float32(-8))
    q = search.numbers(search.d, search.m).astype(np.uint8)
    nibbles = q[: _GROUP // 2] | q[_GROUP // 2 :] << 4
    return np.concatenate([_halves_of(search.d), _halves_of(search.m), nibbles.T], axis=1)


_TYPES: dict[str, Callable[[Floats], Bytes]] = {"Q4_1": _q4_1, "Q8_0": _q8_0}
