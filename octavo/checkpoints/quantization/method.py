"""What a way of quantizing is to the checkpoints room: its name, which tensors are its own, how they make a weight."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.checkpoints.quantization.parts import Parts
from octavo.checkpoints.quantization.weight import QuantizedWeight

__all__ = ["Quantization"]


@dataclass(frozen=True)
class Quantization:
    """How one checkpoint's weights are quantized, from its configuration.

    Attributes:
        name: as config.json and ``--quantization`` have it.
        summary: one line for the log.
        suffixes: ends of the names of tensors that may be parts of a weight.
        assemble: a module's parts → its weight; None where they are ordinary tensors, each for itself.
        unused: ends of the names of tensors that octavo does not use.
        notes: what the configuration asks for and octavo does not do, for the log.
        settings: what all this was read from.
    """

    name: str
    summary: str
    suffixes: frozenset[str]
    assemble: Callable[[Parts], QuantizedWeight | None]
    unused: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
