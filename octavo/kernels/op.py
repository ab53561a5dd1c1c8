"""What an op is: its torch definition, and the implementation that was chosen for it.

A provider is a table of implementations, op name → function with the definition's signature; what it lacks is computed
by the definition, and ``describe`` says so. Adding a provider is one file and one line in PROVIDERS.
"""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from octavo.registry import Registry

__all__ = ["OPS", "PROVIDERS", "TORCH", "Op", "describe", "kernel_set", "op", "select"]

P = ParamSpec("P")
R = TypeVar("R")

Implementations = dict[str, Callable[..., Any]]

# The torch provider replaces nothing: the definitions are its implementations.
TORCH: Implementations = {}
PROVIDERS = Registry("kernel provider", {"torch": "octavo.kernels.op:TORCH"})


class Op(Generic[P, R]):
    """Attributes:

    definition: what the op computes, in plain torch; every other implementation is tested against it.
    provider: name of the provider whose implementation runs.
    """

    def __init__(self, definition: Callable[P, R]) -> None:
        self.name = definition.__name__
        self.definition = definition
        self.provider = "torch"
        self._run = definition
        self.__doc__ = definition.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(*args, **kwargs)

    def choose(self, provider: str, implementations: Implementations) -> None:
        """Runs the provider's implementation from now on; without one, the definition."""
        found = implementations.get(self.name)
        self.provider = "torch" if found is None else provider
        self._run = self.definition if found is None else found


OPS: dict[str, Op[..., Any]] = {}
_kernel_set = "torch"


def op(definition: Callable[P, R]) -> Op[P, R]:
    """Declares an op by its torch definition."""
    declared = Op(definition)
    OPS[declared.name] = declared
    return declared


def select(provider: str) -> None:
    """Chooses the provider of every op. Called once, before a model is loaded.

    Raises:
        UnsupportedError: there is no such provider.
    """
    global _kernel_set
    implementations = PROVIDERS.get(provider)
    for each in OPS.values():
        each.choose(provider, implementations)
    _kernel_set = provider


def kernel_set() -> str:
    """Name of the chosen kernels. Part of every prefix cache hash: KV computed by others is not the same KV."""
    return _kernel_set


def describe() -> str:
    """The chosen kernels in one line: each provider with the ops that it computes."""
    providers: dict[str, list[str]] = {}
    for name, each in sorted(OPS.items()):
        providers.setdefault(each.provider, []).append(name)
    return "; ".join(f"{provider}: {', '.join(names)}" for provider, names in sorted(providers.items()))
