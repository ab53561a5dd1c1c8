"""Memory in huge pages, for packed weights and the KV cache.

A step reads all of its weights, and the keys and values of its requests. In pages of 4 KiB a good part of that time
goes into looking their addresses up: the same loop reads 25 GB/s from such pages and 33 from pages of 2 MiB.
"""

import contextlib
import mmap
import weakref
from threading import Lock

import torch
from torch import Tensor

__all__ = ["huge_memory", "passing_memory"]

_LINE = 64
_CHUNK_BYTES = 256 * 2**20  # of addresses

_lock = Lock()
_chunk: "weakref.ref[mmap.mmap] | None" = None  # alive as long as a tensor lies in it
_used = 0


def huge_memory(num_bytes: int) -> Tensor:
    """[num_bytes] uint8, zero, at the beginning of a cache line. Pages become resident as they are written."""
    global _chunk, _used
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    with _lock:
        chunk = None if _chunk is None else _chunk()
        if chunk is None or _used + num_bytes > len(chunk):
            chunk, _used = _map(max(num_bytes, _CHUNK_BYTES)), 0
            _chunk = weakref.ref(chunk)
        start, _used = _used, -(-(_used + num_bytes) // _LINE) * _LINE
    return torch.frombuffer(chunk, dtype=torch.uint8, count=num_bytes, offset=start)


def passing_memory(num_bytes: int) -> Tensor:
    """[num_bytes] uint8, zero, which the system has back with the tensor: what an allocator keeps for later would count
    as the model's as long as the process lives."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(_anonymous(num_bytes), dtype=torch.uint8)


def _anonymous(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _map(num_bytes: int) -> mmap.mmap:
    chunk = _anonymous(num_bytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk
