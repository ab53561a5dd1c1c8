"""What is asked for, in the log (``--enable-log-requests``), and what is answered (``--enable-log-outputs``). Bounded,
whatever clients send."""

import reprlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from octavo.logging import init_logger
from octavo.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from octavo.engine import EngineInputs

__all__ = ["RequestLogger"]

logger = init_logger("octavo.requests")


class RequestLogger:
    """Args:

    max_log_len: characters and token ids of a prompt, and characters of an answer, that are shown at most.
    log_outputs: answers are shown, too.
    """

    def __init__(self, max_log_len: int, log_outputs: bool = False) -> None:
        self._most = max_log_len
        self._log_outputs = log_outputs

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

    def follow(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        """The same outputs; each choice is logged when it has ended, or as far as it came."""
        return self._followed(outputs) if self._log_outputs else outputs

    async def _followed(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        texts: dict[tuple[str, int], list[str]] = {}
        left: dict[tuple[str, int], int] = {}  # characters that may still be kept
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    for choice in output.outputs:
                        key = output.request_id, choice.index
                        kept = choice.text[: left.setdefault(key, self._most)]
                        left[key] -= len(kept)
                        texts.setdefault(key, []).append(kept)
                        if choice.finished:
                            _log_answer(key, texts.pop(key), choice.finish_reason)
                    yield output
        finally:
            for key, text in texts.items():
                _log_answer(key, text, "abort")


def _log_answer(key: tuple[str, int], text: list[str], finish_reason: str | None) -> None:
    fields = {"request_id": key[0], "index": key[1], "text": "".join(text), "finish_reason": finish_reason}
    logger.info("answered request %s, choice %d: text %r, finish_reason %s", *fields.values(), extra={"fields": fields})


def _stated(params: SamplingParams) -> dict[str, str]:
    """What is not as it would be by itself, shortened."""
    return {
        field.name: reprlib.repr(value)
        for field in msgspec.structs.fields(params)
        if (value := getattr(params, field.name)) not in (field.default, None, "", [], {})
    }
