"""From what a caller asks to what the engine takes: prompt → token ids, parameters → checked and complete.

Every door's requests pass here, so every check of a request that needs the model's facts is made here and only here.
Knows nothing of sockets or of what becomes of the request.
"""

import hashlib
import itertools
import re
import time
from dataclasses import dataclass
from typing import Any, NoReturn, TypedDict

import msgspec

from octavo.config import OctavoConfig
from octavo.errors import RequestError
from octavo.logging import init_logger
from octavo.tokenizers import Tokenizer
from octavo.types import EngineCoreRequest, SamplingParams

__all__ = ["EngineInputs", "InputProcessor", "Prompt", "TextPrompt", "TokensPrompt"]

logger = init_logger(__name__)


class _Salted(TypedDict, total=False):
    cache_salt: str


class TextPrompt(_Salted):
    """A prompt as text."""

    prompt: str


class _Tokens(TypedDict):
    prompt_token_ids: list[int]


class TokensPrompt(_Tokens, _Salted, total=False):
    """A prompt as token ids. ``prompt`` may say what text they came from; it is only handed back."""

    prompt: str | None


Prompt = str | TextPrompt | TokensPrompt

_PROMPT_SHAPES = 'text, {"prompt": text} or {"prompt_token_ids": [token ids]}'
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_CACHE_SALT = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
# Texts with at most so many characters for each token that fits are encoded without a closer look.
_CHARACTERS_A_TOKEN = 16
# Each choice has a copy of the prompt in the engine. So many tokens may be in all copies of one prompt.
_MOST_COPIED_TOKENS = 2**22


@dataclass(frozen=True, slots=True)
class EngineInputs:
    """A request that has passed every check.

    Attributes:
        request_id: the caller's id.
        prompt: the prompt's text, where it was given as text.
        params: a copy of the caller's parameters, with ``seed`` and ``max_tokens`` filled in.
        requests: one for each choice, in order of index.
    """

    request_id: str
    prompt: str | None
    params: SamplingParams
    requests: list[EngineCoreRequest]

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.requests[0].prompt_token_ids


class InputProcessor:
    """Checks requests and makes EngineCoreRequests of them. Thread-safe.

    Attributes:
        max_model_len: longest prompt plus output, tokens. The engine may lower it when it has sized the cache.
    """

    def __init__(self, config: OctavoConfig, tokenizer: Tokenizer) -> None:
        self.max_model_len = config.model.max_model_len
        self._model = config.model
        self._by_priority = config.scheduler.policy == "priority"
        self._tokenizer = tokenizer
        self._request_counter = itertools.count()
        self._longest_token: int | None = None
        if tokenizer.vocab_size > config.model.vocab_size:
            logger.warning(
                "the tokenizer has token ids up to %d, but the model's vocabulary ends at %d; "
                "prompts with tokens beyond it will be refused",
                tokenizer.vocab_size - 1,
                config.model.vocab_size - 1,
            )

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EngineInputs:
        """Checks everything and encodes the prompt's text; this may take a while and is best done off the event loop.

        Args:
            arrival_time: seconds of time.monotonic(); None: now.

        Raises:
            RequestError: the request cannot be served as sent; it names the field.
        """
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        if not isinstance(request_id, str) or not request_id:
            _refuse("request_id", f"request_id must be a string that is not empty, got {_shown(request_id)}")
        _check_unicode("request_id", request_id)
        if not isinstance(params, SamplingParams):
            _refuse("sampling_params", f"sampling_params must be SamplingParams, got {type(params).__name__}")
        self._check_priority(priority)
        text, token_ids, prompt_salt = _parts(prompt)
        if cache_salt is not None and prompt_salt is not None:
            _refuse("cache_salt", "cache_salt is given twice: with the prompt and as an argument")
        salt = cache_salt if cache_salt is not None else prompt_salt
        if salt is not None and (not isinstance(salt, str) or not _CACHE_SALT.fullmatch(salt)):
            _refuse("cache_salt", "cache_salt must be 1 to 128 characters of A-Z a-z 0-9 . _ : -")
        # replace() also brings fields that were assigned after construction into their usual form, and checks them.
        params = msgspec.structs.replace(params)
        self._check_params(params)
        if token_ids is None:
            assert text is not None
            token_ids = self._encode(text)
        else:
            token_ids = self._checked_ids(token_ids)
        self._complete(params, len(token_ids))
        requests = [
            EngineCoreRequest(
                request_id=request_id if params.n == 1 else f"{index}_{request_id}",
                prompt_token_ids=token_ids,
                sampling_params=params,
                eos_token_ids=[] if params.ignore_eos else list(self._model.eos_token_ids),
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=salt,
                choice_index=index,
            )
            for index in range(params.n)
        ]
        return EngineInputs(request_id, text, params, requests)

    def _check_priority(self, priority: Any) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int) or not _INT64_MIN <= priority <= _INT64_MAX:
            _refuse("priority", f"priority must be an integer between {_INT64_MIN} and {_INT64_MAX}")
        if priority != 0 and not self._by_priority:
            _refuse("priority", "priority needs a server that was started with --scheduling-policy priority")

    def _check_params(self, params: SamplingParams) -> None:
        """What the model's facts forbid, whatever the prompt is."""
        for stop in params.stop:
            _check_unicode("stop", stop)
        vocab_size = self._model.vocab_size
        for token_id in params.stop_token_ids:
            if token_id >= vocab_size:
                message = f"stop_token_ids must be ids of the vocabulary, 0 to {vocab_size - 1}; got {token_id}"
                _refuse("stop_token_ids", message)
        if params.logprobs is not None and params.logprobs > self._model.max_logprobs:
            message = f"logprobs must be at most {self._model.max_logprobs} (--max-logprobs), got {params.logprobs}"
            _refuse("logprobs", message)
        if params.max_tokens is not None and params.max_tokens > self.max_model_len:
            message = (
                f"max_tokens is {params.max_tokens}, but the model's context length is {self.max_model_len} tokens"
            )
            _refuse("max_tokens", message)

    def _encode(self, text: str) -> list[int]:
        if not text:
            _refuse("prompt", "prompt must not be empty")
        if len(text) > self.max_model_len * _CHARACTERS_A_TOKEN:
            self._check_characters(len(text))
        _check_unicode("prompt", text)
        token_ids = self._tokenizer.encode(text)
        if not token_ids:
            _refuse("prompt", "prompt must not be empty: its text has no tokens")
        vocab_size = self._model.vocab_size
        if (highest := max(token_ids)) >= vocab_size:  # the tokenizer may be wider than the model
            message = (
                f"the prompt has the token {_shown(self._tokenizer.decode_token(highest))} with id {highest}, but the "
                f"model's vocabulary is 0 to {vocab_size - 1}; leave that text out"
            )
            _refuse("prompt", message)
        return token_ids

    def _check_copies(self, num_choices: int, num_prompt_tokens: int) -> None:
        num_tokens = num_choices * num_prompt_tokens
        if num_choices > 1 and num_tokens > _MOST_COPIED_TOKENS:
            message = (
                f"n is {num_choices} and the prompt has {num_prompt_tokens} tokens, together {num_tokens} in all "
                f"choices, but at most {_MOST_COPIED_TOKENS} are taken; lower n to at most "
                f"{max(_MOST_COPIED_TOKENS // num_prompt_tokens, 1)}"
            )
            _refuse("n", message)

    def _check_characters(self, num_characters: int) -> None:
        """Refuses text that cannot fit, without the price of encoding it: no token is longer than the longest."""
        if self._longest_token is None:
            lengths = (len(self._tokenizer.decode_token(index)) for index in range(self._tokenizer.vocab_size))
            self._longest_token = max(max(lengths), 1)
        fewest = -(-num_characters // self._longest_token)
        if fewest > self.max_model_len:
            message = (
                f"the prompt has {num_characters} characters, which is at least {fewest} tokens, but this model's "
                f"maximum context length is {self.max_model_len} tokens; shorten the prompt"
            )
            _refuse("input_tokens", message)

    def _checked_ids(self, token_ids: Any) -> list[int]:
        if not isinstance(token_ids, list | tuple):
            _refuse("prompt", f"prompt_token_ids must be a list of token ids, got {type(token_ids).__name__}")
        if not token_ids:
            _refuse("prompt", "prompt must not be empty")
        vocab_size = self._model.vocab_size
        if len(token_ids) <= self.max_model_len:  # a longer one is refused for its length, in any case
            if set(map(type, token_ids)) != {int}:
                wrong = next(token_id for token_id in token_ids if type(token_id) is not int)
                _refuse("prompt", f"prompt token ids must be integers, got {_shown(wrong)}")
            low, high = min(token_ids), max(token_ids)
            if low < 0 or high >= vocab_size:
                message = (
                    f"prompt token ids must be ids of the vocabulary, 0 to {vocab_size - 1}; "
                    f"got {_shown(low if low < 0 else high)}"
                )
                _refuse("prompt", message)
        return list(token_ids)

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Fills in ``max_tokens`` and ``seed``, once it is known that prompt and output fit."""
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            message = (
                f"the prompt has {num_prompt_tokens} tokens, but this model's maximum context length is "
                f"{self.max_model_len} tokens, output included; shorten the prompt"
            )
            _refuse("input_tokens", message)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if max_tokens > room:
            message = (
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together "
                f"{num_prompt_tokens + max_tokens}, but this model's maximum context length is {self.max_model_len} "
                f"tokens; shorten the prompt, or lower max_tokens to at most {room}"
            )
            _refuse("input_tokens", message)
        if params.min_tokens > max_tokens:
            message = f"min_tokens is {params.min_tokens}, but the prompt leaves room for {max_tokens} tokens"
            _refuse("min_tokens", message)
        self._check_copies(params.n, num_prompt_tokens)
        params.max_tokens = max_tokens
        if params.seed is None:
            params.seed = self._draw_seed()
        params.stop = list(params.stop)
        params.stop_token_ids = list(params.stop_token_ids)

    def _draw_seed(self) -> int:
        """The seed of the next request that has none: a function of the engine's seed and a running number."""
        key = f"{self._model.seed}:{next(self._request_counter)}".encode()
        # 63 bits: never negative, for -1 means "no seed" to SamplingParams.
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def _parts(prompt: Any) -> tuple[str | None, Any, Any]:
    """(text, token ids, cache salt) of a prompt in one of its shapes."""
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, dict):
        _refuse("prompt", f"prompt must be {_PROMPT_SHAPES}; got {type(prompt).__name__}")
    for key in prompt:
        if key not in _PROMPT_KEYS:
            _refuse("prompt", f"prompt has an unknown key {_shown(key)}; known: {', '.join(_PROMPT_KEYS)}")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        _refuse("prompt", f"prompt must be {_PROMPT_SHAPES}; its text is {type(text).__name__}")
    if text is None and token_ids is None:
        _refuse("prompt", f"prompt must be {_PROMPT_SHAPES}; it has neither")
    return text, token_ids, prompt.get("cache_salt")


def _check_unicode(name: str, text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        _refuse(name, f"{name} is not valid Unicode text: a lone surrogate at character {error.start}")


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**128 else "a very large integer"
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(message, param=param)
