"""Custom logits processors: classes that the operator names at start-up (``--logits-processors module:Class``).

Each request brings its own arguments for them, in ``extra_args``. A processor gets one row at a time, so that it
cannot touch a neighbour's; what it raises fails the request that it was called for, and no other.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module

from torch import Tensor

from octavo.config import OctavoConfig
from octavo.errors import ConfigError
from octavo.logging import one_line
from octavo.types import SamplingParams

__all__ = ["LogitsProcessor", "NamedProcessor", "RowProcessor", "load_logits_processors", "request_processors"]

# (ids of the tokens generated so far, logits [vocab_size] float32) → logits of the same shape and type.
RowProcessor = Callable[[list[int], Tensor], Tensor]
# With its name, for messages.
NamedProcessor = tuple[str, RowProcessor]


class LogitsProcessor(ABC):
    """Base class of custom processors; made once, when the model is loaded."""

    def __init__(self, config: OctavoConfig) -> None:
        self.config = config

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Called in the front end for every request. A ValueError refuses the request; its message is the client's."""
        return

    @abstractmethod
    def new_request(self, params: SamplingParams, prompt_token_ids: list[int]) -> RowProcessor | None:
        """What is called for this request at every token; None: the request does not use this processor.

        The result may keep a state, but must be a function of the tokens that it is given: after a preemption the
        request comes as new again, and goes on from where it was. It may change the logits in place.
        """


def load_logits_processors(names: Sequence[str]) -> list[type[LogitsProcessor]]:
    """Imports the classes of ``--logits-processors``; ConfigError for a name that is none."""
    return [_load(name) for name in names]


def _load(name: str) -> type[LogitsProcessor]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"--logits-processors must name classes as module:Class, got {name!r}")
    try:
        found = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the module's own code raises
        cause = one_line(f"{type(error).__name__}: {error}")
        raise ConfigError(f"--logits-processors {name}: cannot be imported: {cause}") from error
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor) or inspect.isabstract(found):
        raise ConfigError(
            f"--logits-processors {name}: must be a subclass of octavo.sample.LogitsProcessor with a new_request method"
        )
    return found


def request_processors(
    processors: Sequence[LogitsProcessor], params: SamplingParams, prompt_token_ids: list[int]
) -> list[NamedProcessor]:
    """The processors that a request uses. One that fails to take it fails it at its first token."""
    used = []
    for processor in processors:
        try:
            process = processor.new_request(params, list(prompt_token_ids))
        except (Exception, SystemExit) as error:
            process = _raiser(error)
        if process is not None:
            used.append((type(processor).__name__, process))
    return used


def _raiser(error: BaseException) -> RowProcessor:
    def fail(output_token_ids: list[int], logits: Tensor) -> Tensor:
        raise error

    return fail
