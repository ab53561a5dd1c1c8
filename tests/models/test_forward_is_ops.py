"""A forward is ops of ``octavo.kernels`` and views: nothing else computes or copies. So it can be recorded as the calls
of native kernels and replayed for any number of rows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from octavo import kernels
from tests.models.test_bitwise import MODELS


class Watch(TorchDispatchMode):
    """Attributes:

    computed: torch's operations whose result was no view.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Not by the schema: reshape, contiguous and to are views there, and may copy.
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if not all(_storage(x) in given for x in tree_leaves(result)):
            self.computed.append(str(func))
        return result


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def computed_by_torch(paged: Any, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In the forward of a prompt and a second request's token, outside of ops."""
    watch = Watch()
    run, forward = kernels.Op.__call__, paged.model.forward

    def unseen(op: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return run(op, *args, **kwargs)

    def watched(input_ids: Tensor, positions: Tensor) -> Tensor:
        with watch:
            hidden: Tensor = forward(input_ids, positions)
        return hidden

    monkeypatch.setattr(kernels.Op, "__call__", unseen)
    monkeypatch.setattr(paged.model, "forward", watched)
    paged.step([("prompt", tokens[:-1]), ("token", tokens[-1:])])
    return watch.computed


@pytest.mark.parametrize("name", MODELS)
def test_torch_computes_nothing_in_a_forward(
    make_model: Callable[..., Path], paged_model: Any, random_tokens: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    paged = paged_model(make_model(**MODELS[name]), dtype="bfloat16")
    assert computed_by_torch(paged, random_tokens(20), monkeypatch) == []


def test_control_a_norm_of_torch_is_noticed(
    make_model: Callable[..., Path], paged_model: Any, random_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + x).bfloat16()

    paged = paged_model(make_model(), dtype="bfloat16")
    paged.model.model.norm = Doubling()
    assert computed_by_torch(paged, random_tokens(20), monkeypatch) == ["aten.add.Tensor", "aten.to.dtype"]
