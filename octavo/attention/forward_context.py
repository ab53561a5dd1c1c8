"""The step's attention metadata, set by the runner around a forward and read by the attention layers.

So model code need not know the batch. The context belongs to the thread (and task) that set it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from octavo.kernels import AttentionMetadata

__all__ = ["get_forward_context", "set_forward_context"]

_context: ContextVar[Mapping[str, AttentionMetadata] | None] = ContextVar("forward_context", default=None)


@contextmanager
def set_forward_context(metadata: Mapping[str, AttentionMetadata]) -> Iterator[None]:
    """Makes ``metadata`` (layer name → its KV cache group's) the one that layers read, for a ``with`` block."""
    token = _context.set(metadata)
    try:
        yield
    finally:
        _context.reset(token)


def get_forward_context() -> Mapping[str, AttentionMetadata]:
    """The metadata of the forward that is running; outside of one, a RuntimeError."""
    metadata = _context.get()
    if metadata is None:
        raise RuntimeError("attention ran outside of set_forward_context(): the runner sets it around each forward")
    return metadata
