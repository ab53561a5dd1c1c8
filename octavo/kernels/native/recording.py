"""Step replay: a forward recorded once, and run again for any number of rows in one native call.

The model's Python runs over buffers that stay where they are; its calls of native kernels are kept by the library
(csrc/cpu/replay.hpp). Under a TorchDispatchMode, views pass; an op of torch's that computes becomes a piece of Python
between two recordings, run again on views of the same buffers (PIECEWISE instead of FULL). The forward is recorded for
three numbers of rows, and refused where they differ in anything else: what depends on the number of rows cannot be
replayed. Nothing is computed while it is recorded, but for torch's ops.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from octavo import _native
from octavo.errors import UnsupportedError
from octavo.kernels.arena import Arena

__all__ = ["RecordedForward", "record_forward"]


@dataclass(frozen=True)
class _Rows:
    """A tensor that a piece of Python reads or writes: its first dimension is the step's rows."""

    tensor: Tensor

    def view(self, rows: int) -> Tensor:
        tensor = self.tensor
        return tensor.as_strided((rows, *tensor.shape[1:]), tensor.stride(), tensor.storage_offset())

    def same(self, other: "_Rows") -> bool:
        mine, theirs = self.tensor, other.tensor
        place = (mine.data_ptr(), mine.dtype, mine.shape[1:])
        return place == (theirs.data_ptr(), theirs.dtype, theirs.shape[1:])


class _TorchPiece:
    """A call of one of torch's ops. ``arguments`` and ``results`` are leaves of their trees: tensors of rows as
    ``_Rows``, others as they are."""

    def __init__(self, func: Any, arguments: list[Any], structure: Any, results: list[Any]) -> None:
        self.func = func
        self.arguments = arguments
        self.structure = structure
        self.results = results

    def run(self, rows: int) -> None:
        leaves = [each.view(rows) if isinstance(each, _Rows) else each for each in self.arguments]
        args, kwargs = tree_unflatten(leaves, self.structure)
        found, _ = tree_flatten(self.func(*args, **kwargs))
        for result, kept in zip(found, self.results, strict=True):
            if isinstance(kept, _Rows):
                kept.view(rows).copy_(result)

    def same(self, other: object) -> bool:
        if not isinstance(other, _TorchPiece) or self.func is not other.func or self.structure != other.structure:
            return False
        mine, theirs = self.arguments + self.results, other.arguments + other.results
        return len(mine) == len(theirs) and all(_same_leaf(a, b) for a, b in zip(mine, theirs, strict=True))


def _same_leaf(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, _Rows) or isinstance(theirs, _Rows):
        return isinstance(mine, _Rows) and isinstance(theirs, _Rows) and mine.same(theirs)
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return mine.data_ptr() == theirs.data_ptr() and mine.shape == theirs.shape and mine.dtype == theirs.dtype
    return type(mine) is type(theirs) and bool(mine == theirs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records one run of a forward over ``rows`` rows of one request."""

    def __init__(self, arena: Arena, inputs: tuple[Tensor, ...], rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self._rows = rows
        self.parts: list[Any] = []
        self._begin()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True, torch's default, imports torch's compiler at the first op: a second of start-up."""
        return False

    def _begin(self) -> None:
        """From here on, calls of native kernels are kept."""
        if not self.parts or isinstance(self.parts[-1], _TorchPiece):
            self.parts.append(_native.Recording(self._rows, 1))
        self.parts[-1].begin()

    def end(self) -> None:
        """They are made again."""
        if isinstance(self.parts[-1], _native.Recording):
            self.parts[-1].end()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Torch's own ops only: what a piece of Python computes is not recorded as kernels.
        self.end()
        try:
            return self._result(func, args, kwargs or {})
        finally:
            self._begin()

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        output = func(*args, **kwargs)
        found, output_structure = tree_flatten(output)
        if not all(isinstance(each, Tensor) for each in found):
            raise UnsupportedError(f"{func} gives Python a value that is known only when the step runs")
        storages = {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)}
        inside = [each.untyped_storage().data_ptr() in storages for each in found]
        if all(inside) and not func._schema.is_mutable:
            return output  # views
        given: list[Tensor] = []
        results: list[_Rows | None] = []
        for each, is_view in zip(found, inside, strict=True):
            given.append(each if is_view else self._arena.take(tuple(each.shape), each.dtype))
            results.append(None if is_view else _Rows(given[-1]))
        self.parts.append(_TorchPiece(func, [self._argument(leaf) for leaf in leaves], structure, results))
        return tree_unflatten(given, output_structure)

    def _argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not self._arena.owns(leaf) and leaf.untyped_storage().data_ptr() not in self._inputs:
            return leaf  # a weight, a table
        if leaf.ndim == 0 or leaf.shape[0] != self._rows:
            raise UnsupportedError(f"an op of torch's reads shape {list(leaf.shape)} of {self._rows} tokens")
        return _Rows(leaf)


class RecordedForward:
    """Attributes:

    mode: ``"FULL"``: one native call; ``"PIECEWISE"``: with ops of torch's between native calls.
    split_by: names of these ops.
    output: [max_rows, …] where ``run`` leaves what it computes.
    whole: that native call; None: there is more than one.
    """

    def __init__(self, parts: list[_native.Recording | _TorchPiece], arena: Arena, output: Tensor) -> None:
        self._arena = arena  # what the kernels read and write lives as long as this
        self._parts = [part for part in parts if isinstance(part, _TorchPiece) or part.kernels()]
        self.output = output
        self.split_by = sorted({str(part.func) for part in parts if isinstance(part, _TorchPiece)})
        self.mode: Literal["FULL", "PIECEWISE"] = "PIECEWISE" if self.split_by else "FULL"
        kernels = [part for part in self._parts if not isinstance(part, _TorchPiece)]
        self.whole = kernels[0] if len(kernels) == len(self._parts) == 1 else None

    def kernels(self) -> list[str]:
        """Names of the native kernels, in order."""
        return [name for part in self._parts if not isinstance(part, _TorchPiece) for name in part.kernels()]

    def run(self, rows: int, requests: int) -> Tensor:
        """Computes the forward over the first ``rows`` of the buffers → [rows, …], good until the next run."""
        for part in self._parts:
            if isinstance(part, _TorchPiece):
                part.run(rows)
            else:
                part.run(rows, requests)
        return self.output[:rows]


def record_forward(forward: Callable[[int], Tensor], inputs: tuple[Tensor, ...], max_rows: int) -> RecordedForward:
    """Args:

        forward: runs the model over the first so many rows of the step's buffers, as one request.
        inputs: these buffers, of ``max_rows`` each.

    Raises:
        UnsupportedError: it depends on the number of rows, or on values.
    """
    arena = Arena(max_rows)
    recorder, output = _record_once(forward, inputs, arena, max_rows)
    for rows in {1, min(2, max_rows)} - {max_rows}:
        again, other_output = _record_once(forward, inputs, arena, rows)
        if not _Rows(output).same(_Rows(other_output)) or not _same_parts(recorder.parts, again.parts):
            raise UnsupportedError(f"what it computes for {rows} tokens is not what it computes for {max_rows}")
    return RecordedForward(recorder.parts, arena, output)


def _record_once(
    forward: Callable[[int], Tensor], inputs: tuple[Tensor, ...], arena: Arena, rows: int
) -> tuple[_Recorder, Tensor]:
    recorder = _Recorder(arena, inputs, rows)
    try:
        with arena.used(rows), recorder:
            output = forward(rows)
    except (ValueError, RuntimeError, IndexError) as error:
        raise UnsupportedError(str(error)) from error
    finally:
        recorder.end()
    if not arena.owns(output) or output.shape[0] != rows:
        raise UnsupportedError("its result is not computed by what was recorded")
    return recorder, output


def _same_parts(mine: list[Any], theirs: list[Any]) -> bool:
    if len(mine) != len(theirs):
        return False
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(a, _TorchPiece):
            if not a.same(b):
                return False
        elif isinstance(b, _TorchPiece) or not a.same_calls(b):
            return False
    return True
