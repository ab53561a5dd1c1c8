"""The front end's side of custom logits processors: their classes say at the door whether they take a request.

The worker applies them; here they are only asked. They are imported, and torch with them, if there are any.
"""

import time
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.engine.prompts import refuse
from octavo.errors import RequestError, RequestFailedError
from octavo.logging import init_logger, one_line
from octavo.types import SamplingParams

if TYPE_CHECKING:
    from octavo.sample import LogitsProcessor

__all__ = ["CustomProcessors"]

logger = init_logger(__name__)


class CustomProcessors:
    """Args:

    names: ``module:Class`` of each.

    Raises:
        ConfigError: one cannot be imported, or is no LogitsProcessor.
    """

    def __init__(self, names: list[str]) -> None:
        self._classes: list[type[LogitsProcessor]] = []
        if names:
            started = time.monotonic()
            from octavo.sample import load_logits_processors

            self._classes = load_logits_processors(names)
            logger.info(
                "custom logits processors: %s; importing them, and torch, took the front end %.1f s",
                ", ".join(names),
                time.monotonic() - started,
            )

    def take(self, params: SamplingParams) -> None:
        """Asks every class whether it takes the request. ``extra_args`` become what the engine will see.

        Raises:
            RequestError: one refuses it, or there is nobody whom extra_args could be for.
            RequestFailedError: one fails.
        """
        if params.extra_args:
            if not self._classes:
                message = "extra_args are for custom logits processors, but none is configured (--logits-processors)"
                refuse("extra_args", message)
            params.extra_args = _sent(params.extra_args)
        for each in self._classes:
            try:
                each.validate_params(params)
            except RequestError:
                raise
            except ValueError as error:
                message = " ".join(str(error).split())[:300] or f"extra_args are refused by {each.__name__}"
                raise RequestError(message, param="extra_args") from error
            except Exception as error:
                cause = one_line(f"{type(error).__name__}: {error}")
                raise RequestFailedError(f"logits processor {each.__name__} could not check it: {cause}") from error


def _sent(extra_args: dict[str, Any]) -> dict[str, Any]:
    """A copy, through the encoding in which requests travel: the same whether the engine is a process or an object."""
    try:
        copy: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(extra_args))
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        refuse("extra_args", f"extra_args must be plain data, as JSON has it: {one_line(str(error))[:200]}")
    return copy
