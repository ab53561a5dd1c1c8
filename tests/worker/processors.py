"""Custom logits processors for the tests: one that works, and one that goes wrong in every way it can."""

from typing import Any

import torch
from torch import Tensor

from octavo.sample import LogitsProcessor, RowProcessor
from octavo.types import SamplingParams

NAMES = ["tests.worker.processors:Boost", "tests.worker.processors:Faulty"]


def boosted(logits: list[float], params: SamplingParams, prompt: list[int], position: int) -> list[float]:
    """What Boost makes of ``logits``, as plain values."""
    target = (prompt[0] + position) % len(logits)
    boost = params.extra_args.get("boost", 0.0)
    return [logit + boost if token_id == target else logit for token_id, logit in enumerate(logits)]


class Boost(LogitsProcessor):
    """``extra_args["boost"]`` is added to a token that depends on the prompt and on the tokens so far."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if not isinstance(params.extra_args.get("boost", 0.0), float):
            raise ValueError("boost must be a number")

    def new_request(self, params: SamplingParams, prompt_token_ids: list[int]) -> RowProcessor | None:
        boost = params.extra_args.get("boost")
        if boost is None:
            return None

        def process(output_token_ids: list[int], logits: Tensor) -> Tensor:
            logits[(prompt_token_ids[0] + len(output_token_ids)) % len(logits)] += boost
            output_token_ids.clear()  # its own to do with what it likes
            return logits

        return process


class Faulty(LogitsProcessor):
    """``extra_args["fault"]`` says what is wrong with it, ``extra_args["after"]`` after how many tokens."""

    def new_request(self, params: SamplingParams, prompt_token_ids: list[int]) -> RowProcessor | None:
        fault, after = params.extra_args.get("fault"), params.extra_args.get("after", 0)
        if fault == "new_request":
            raise KeyError("made up")
        if fault is None:
            return None

        def process(output_token_ids: list[int], logits: Tensor) -> Tensor:
            return wrong(fault, logits) if len(output_token_ids) >= after else logits

        return process


def wrong(fault: str, logits: Tensor) -> Any:
    logits += 1.0
    match fault:
        case "raises":
            raise RuntimeError("made up\nin two lines")
        case "overflows":
            raise OverflowError("made up")
        case "shape":
            return logits[:-1]
        case "dtype":
            return logits.double()
        case "nan":
            return torch.full_like(logits, torch.nan)
        case "nothing":
            return None
    raise AssertionError(fault)


class Unmakeable(LogitsProcessor):
    def __init__(self, config: Any) -> None:
        raise OSError("made up")

    def new_request(self, params: SamplingParams, prompt_token_ids: list[int]) -> RowProcessor | None:
        return None


class NoProcessor:
    """Has the method, but not the base."""

    def new_request(self, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        return None


class Unfinished(LogitsProcessor):
    """Lacks the method."""
