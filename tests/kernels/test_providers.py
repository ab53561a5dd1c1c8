"""An op runs its torch definition unless the chosen provider has something else; the choice can be printed."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from octavo import kernels
from octavo.errors import UnsupportedError


@pytest.fixture(autouse=True)
def torch_again() -> Iterator[None]:
    yield
    kernels.select("torch")


@pytest.fixture
def doubling_provider(monkeypatch: pytest.MonkeyPatch) -> str:
    """A provider with an implementation of gelu only, and a wrong one."""
    module = ModuleType("doubling_provider")
    doubled = {"gelu": lambda *args: 2 * kernels.OPS["gelu"].definition(*args)}
    provider = kernels.Provider(name="doubling", kernel_set="doubling-2", implementations=doubled)
    module.make = lambda: provider  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "doubling_provider", module)
    if "doubling" not in kernels.PROVIDERS:
        kernels.PROVIDERS.register("doubling", "doubling_provider:make")
    return "doubling"


def test_the_torch_provider_runs_every_definition() -> None:
    kernels.select("torch")
    assert kernels.kernel_set() == "torch"
    assert {op.provider for op in kernels.OPS.values()} == {"torch"}


def test_a_provider_replaces_what_it_has_and_the_table_says_so(doubling_provider: str) -> None:
    x = torch.randn(2, 6)
    defined = kernels.gelu(x, "none")
    kernels.select(doubling_provider)
    assert kernels.kernel_set() == "doubling-2"
    assert torch.equal(kernels.gelu(x, "none"), 2 * defined)
    assert torch.equal(kernels.rms_norm(x, torch.ones(6), 1e-5), kernels.rms_norm.definition(x, torch.ones(6), 1e-5))
    others = ", ".join(sorted(set(kernels.OPS) - {"gelu"}))
    assert kernels.describe() == f"doubling-2: gelu; torch: {others}"


def test_an_unknown_provider_is_refused_and_changes_nothing() -> None:
    with pytest.raises(UnsupportedError, match="kernel provider 'abacus' is not supported; supported: "):
        kernels.select("abacus")
    assert kernels.kernel_set() == "torch"


def test_every_op_is_defined_and_documented() -> None:
    assert {"embedding", "linear", "rms_norm", "paged_attention", "reshape_and_cache"} <= set(kernels.OPS)
    for op in kernels.OPS.values():
        assert op.definition.__doc__, op.name
        assert getattr(kernels, op.name) is op
