"""What a request may ask of the sampler, and the one place where it is checked."""

import math
from enum import IntEnum
from typing import Any

import msgspec

from octavo.errors import RequestError

__all__ = ["MAX_CHOICES", "RequestOutputKind", "SamplingParams"]

MAX_CHOICES = 16384
# Every stop string is looked for in the text of every token, and all of them are kept for each choice.
_MOST_STOP_STRINGS, _LONGEST_STOP_STRING = 128, 1024
_MOST_STOP_TOKEN_IDS = 1024
_SEED_MIN, _SEED_MAX = -(2**63), 2**63 - 1
_TOKEN_COUNT_MAX = 2**31 - 1
# Below this temperature the distribution is a point mass in float32; vLLM treats it as greedy too.
GREEDY_TEMPERATURE = 1e-5


class RequestOutputKind(IntEnum):
    """What each ``RequestOutput`` of a request carries."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, at the end


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request, with vLLM's names and meanings.

    Attributes:
        n: number of choices to generate from the prompt.
        temperature: 0 to 2; below 1e-5 the most likely token is taken (ties: the lower id).
        top_p: keep the smallest set of most likely tokens whose probability reaches ``top_p``; (0, 1].
        top_k: keep the ``top_k`` most likely tokens; 0 or -1 keeps all.
        seed: key of the request's random numbers (int64). Same seed, same text, whatever else is in the batch.
            ``None``: the engine draws one at the door.
        stop: strings that end the generation; they are not part of the returned text. At most 128 of at most 1024
            characters.
        stop_token_ids: token ids that end the generation, at most 1024.
        ignore_eos: go on past the model's own end-of-sequence tokens.
        max_tokens: most tokens to generate; ``None``: as many as the model's length leaves.
        min_tokens: end-of-sequence, ``stop_token_ids`` and ``stop`` do not act before so many tokens.
        logprobs: return the log-probabilities of so many most likely tokens, and of the sampled one, at every
            position; of the raw distribution, before temperature and filters.
        output_kind: see RequestOutputKind.

    Raises:
        RequestError: (a ValueError) for a value out of range; it names the parameter.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        elif self.stop is None:
            self.stop = []
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.top_k == -1:
            self.top_k = 0
        if self.seed == -1:
            self.seed = None
        self.verify()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken at every position."""
        return self.temperature < GREEDY_TEMPERATURE

    def clone(self) -> "SamplingParams":
        """A copy that shares no list with this one."""
        return msgspec.structs.replace(self, stop=list(self.stop), stop_token_ids=list(self.stop_token_ids))

    def verify(self) -> None:
        """Raises RequestError for the first field that has a wrong type or is out of range."""
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, 0, _TOKEN_COUNT_MAX, note=" (0 or -1 keeps all tokens)")
        if self.seed is not None:
            _integer("seed", self.seed, _SEED_MIN, _SEED_MAX)
        self._verify_stops()
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", self.ignore_eos, "true or false")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, _TOKEN_COUNT_MAX)
        _integer("min_tokens", self.min_tokens, 0, _TOKEN_COUNT_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens ({self.min_tokens}) must not be larger than max_tokens ({self.max_tokens})"
            raise RequestError(message, param="min_tokens")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, _TOKEN_COUNT_MAX)
        if self.n > 1 and self.greedy:
            message = f"n must be 1 when temperature is 0 (all choices would be equal), got {self.n}"
            raise RequestError(message, param="n")

    def _verify_stops(self) -> None:
        _short_list("stop", self.stop, _MOST_STOP_STRINGS, "strings", "a string or a list of strings")
        if not all(isinstance(stop, str) for stop in self.stop):
            raise _wrong("stop", self.stop, "a string or a list of strings")
        if "" in self.stop:
            raise RequestError("stop must not contain an empty string", param="stop")
        longest = max(map(len, self.stop), default=0)
        if longest > _LONGEST_STOP_STRING:
            message = f"stop must be strings of at most {_LONGEST_STOP_STRING} characters, got one of {longest}"
            raise RequestError(message, param="stop")
        _short_list("stop_token_ids", self.stop_token_ids, _MOST_STOP_TOKEN_IDS, "token ids", "a list of token ids")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, _TOKEN_COUNT_MAX)


def _wrong(name: str, value: Any, expected: str) -> RequestError:
    return RequestError(f"{name} must be {expected}, got {_shown(value)}", param=name)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _short_list(name: str, value: Any, most: int, kind: str, expected: str) -> None:
    """Comes before any look at the entries: there may be millions."""
    if not isinstance(value, list):
        raise _wrong(name, value, expected)
    if len(value) > most:
        raise RequestError(f"{name} must be at most {most} {kind}, got {len(value)}", param=name)


def _integer(name: str, value: Any, low: int, high: int, note: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, value, "an integer")
    if not low <= value <= high:
        raise _wrong(name, value, f"between {low} and {high}{note}")


def _number(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, value, "a number")
    if math.isnan(value) or value < low or value > high or (low_open and value == low):
        bounds = f"above {low:g} and at most {high:g}" if low_open else f"between {low:g} and {high:g}"
        raise _wrong(name, value, bounds)
