"""How much memory a forward takes: watches every tensor that comes and goes.

On CPUs torch keeps no statistics of its allocator, and the process's resident size moves for other reasons too.
What an op allocates inside and frees before it returns is not seen.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["PeakMemory"]


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``with PeakMemory() as watched: ...`` then ``watched.peak_bytes``: most bytes that were alive at once among
    the tensors made inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._bytes = 0
        self._alive: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True, torch's default, imports torch's compiler at the first op: 800 modules, a second of start-up."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            # A view, or the result of an op in place, has a storage that is not new.
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                self._bytes += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata)
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return result

    def _forget(self, key: int) -> None:
        self._bytes -= self._alive.pop(key)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
