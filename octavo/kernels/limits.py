"""What this machine could do at best, measured with the native library's own threads."""

import time
from collections.abc import Callable

from octavo import _native
from octavo.kernels.memory import huge_memory

__all__ = ["kernel_seconds", "measure_bandwidth", "measure_bf16", "measure_f32", "measure_int8"]

_RUNS = 9


def kernel_seconds() -> float:
    """Seconds that native kernels have taken in this process so far."""
    return _native.kernel_seconds()


def measure_bandwidth(num_bytes: int) -> float:
    """Bytes a second at which a buffer of ``num_bytes`` (whole pages) is read, from memory like that of packed
    weights: the best of several runs."""
    buffer = huge_memory(num_bytes).fill_(1)
    return num_bytes / min(_seconds(lambda: _native.stream(buffer.data_ptr(), num_bytes)) for _ in range(_RUNS))


def measure_bf16(runs: int = _RUNS) -> float:
    """Operations a second (a product and a sum are two) of the bfloat16 products that the kernels use: the best of
    ``runs``."""
    return _rate(_native.multiply_bf16, runs)


def measure_f32(runs: int = _RUNS) -> float:
    """The same for products of floats; where pairs of bfloat16 are slower, the kernels may widen them."""
    return _rate(_native.multiply_f32, runs)


def measure_int8() -> float:
    """The same for products of bytes; 0 where the level has none."""
    return _rate(_native.multiply_int8, _RUNS)


def _rate(work: Callable[[], int], runs: int) -> float:
    best = 0.0
    for _ in range(runs):
        start = time.perf_counter()
        operations = work()
        best = max(best, operations / (time.perf_counter() - start))
    return best


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
