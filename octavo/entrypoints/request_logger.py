"""What is asked for, in the log (``--enable-log-requests``). Bounded, whatever clients send."""

import reprlib
from typing import TYPE_CHECKING

import msgspec

from octavo.logging import init_logger
from octavo.types import SamplingParams

if TYPE_CHECKING:
    from octavo.engine import EngineInputs

__all__ = ["RequestLogger"]

logger = init_logger("octavo.requests")


class RequestLogger:
    """Args:

    max_log_len: characters and token ids of a prompt that are shown at most.
    """

    def __init__(self, max_log_len: int) -> None:
        self._most = max_log_len

    def log_inputs(self, inputs: "EngineInputs") -> None:
        """A request that will be started."""
        prompt = None if inputs.prompt is None else inputs.prompt[: self._most]
        fields = {
            "request_id": inputs.request_id,
            "prompt": prompt,
            "prompt_token_ids": inputs.prompt_token_ids[: self._most],
            "params": _stated(inputs.params),
        }
        logger.info(
            "received request %s: prompt %r, prompt_token_ids %s, params %s", *fields.values(), extra={"fields": fields}
        )


def _stated(params: SamplingParams) -> dict[str, str]:
    """What is not as it would be by itself, shortened."""
    return {
        field.name: reprlib.repr(value)
        for field in msgspec.structs.fields(params)
        if (value := getattr(params, field.name)) not in (field.default, None, "", [], {})
    }
