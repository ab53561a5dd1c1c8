"""What an op is: its torch definition, and the implementation that was chosen for it.

A provider is a table of implementations, op name → function with the definition's signature; what it lacks is computed
by the definition, and ``describe`` says so. Adding a provider is one file and one line in PROVIDERS.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar

from torch import Tensor

from octavo.errors import UnsupportedError
from octavo.registry import Registry

__all__ = [
    "OPS",
    "PROVIDERS",
    "Op",
    "Provider",
    "RecordedForward",
    "chosen_provider",
    "describe",
    "kernel_set",
    "op",
    "record_forward",
    "select",
]

P = ParamSpec("P")
R = TypeVar("R")

Implementations = Mapping[str, Callable[..., Any]]


class RecordedForward(Protocol):
    """A forward over buffers that stay where they are, to be run again for any number of their rows.

    Attributes:
        mode: ``"FULL"``: all of it in one call of the provider; ``"PIECEWISE"``: with ops of torch's between.
        split_by: names of these ops.
        output: [max_rows, …] where ``run`` leaves what it computes.
        whole: the provider's own form of it, where that is one call; else None.
    """

    mode: Literal["FULL", "PIECEWISE"]
    split_by: list[str]
    output: Tensor
    whole: Any

    def run(self, rows: int, requests: int) -> Tensor:
        """Computes the first ``rows`` → [rows, …], good until the next run."""
        ...


# (forward of so many rows, its input buffers, their rows) → the same, recorded. UnsupportedError: it cannot be.
RecordForward = Callable[[Callable[[int], Tensor], tuple[Tensor, ...], int], RecordedForward]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Attributes:

    name: key in PROVIDERS.
    kernel_set: tells apart what gives other bits: the provider and, where it has several, its level.
    implementations: op name → function with the definition's signature.
    record_forward: makes a forward that can be replayed; None: the provider cannot.
    """

    name: str
    kernel_set: str
    implementations: Implementations
    record_forward: "RecordForward | None" = None


def torch_provider() -> Provider:
    """Replaces nothing: the definitions are its implementations."""
    return Provider(name="torch", kernel_set="torch", implementations={})


# Functions that make a provider ready for use.
PROVIDERS = Registry(
    "kernel provider",
    {"native": "octavo.kernels.native:native_provider", "torch": "octavo.kernels.op:torch_provider"},
)


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

    def choose(self, provider: Provider) -> None:
        """Runs the provider's implementation from now on; without one, the definition."""
        found = provider.implementations.get(self.name)
        self.provider = "torch" if found is None else provider.name
        self._run = self.definition if found is None else found


OPS: dict[str, Op[..., Any]] = {}
_chosen = torch_provider()


def op(definition: Callable[P, R]) -> Op[P, R]:
    """Declares an op by its torch definition."""
    declared = Op(definition)
    OPS[declared.name] = declared
    return declared


def select(name: str) -> None:
    """Chooses the provider of every op. Called once, before a model is loaded.

    Raises:
        UnsupportedError: there is no such provider.
        ConfigError: it cannot be used on this machine as the environment asks.
    """
    global _chosen
    _chosen = PROVIDERS.get(name)()
    for each in OPS.values():
        each.choose(_chosen)


def record_forward(forward: Callable[[int], Tensor], inputs: tuple[Tensor, ...], max_rows: int) -> RecordedForward:
    """Records a forward, so that a step need not run its Python.

    Args:
        forward: runs the model over the first so many rows of the step's buffers, as one request.
        inputs: these buffers, of ``max_rows`` each.

    Raises:
        UnsupportedError: the chosen kernels cannot, or the forward depends on the number of rows, or on values.
    """
    if _chosen.record_forward is None:
        raise UnsupportedError(f"{_chosen.name} kernels cannot be recorded")
    return _chosen.record_forward(forward, inputs, max_rows)


def chosen_provider() -> str:
    """Name of the chosen provider."""
    return _chosen.name


def kernel_set() -> str:
    """Name of the chosen kernels. Part of every prefix cache hash: KV computed by others is not the same KV."""
    return _chosen.kernel_set


def describe() -> str:
    """The chosen kernels in one line: each provider with the ops that it computes."""
    providers: dict[str, list[str]] = {}
    for name, each in sorted(OPS.items()):
        providers.setdefault(each.provider, []).append(name)
    shown = {_chosen.name: _chosen.kernel_set}
    return "; ".join(f"{shown.get(name, name)}: {', '.join(names)}" for name, names in sorted(providers.items()))
