"""From what a caller asks to what the engine takes: prompt → token ids, parameters → checked and complete.

Every door's requests pass here, so every check of a request that needs the model's facts is made here and only here.
Knows nothing of sockets or of what becomes of the request.
"""

import hashlib
import itertools
import re
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.config import OctavoConfig
from octavo.engine.bad_words import encode_bad_words
from octavo.engine.custom_processors import CustomProcessors
from octavo.engine.params_check import (
    check_ids,
    check_output_logprobs,
    check_params,
    check_prompt_logprobs,
    check_something_is_left,
)
from octavo.engine.prompts import Prompt, check_unicode, refuse, shown, split_prompt
from octavo.engine.sampling_defaults import default_sampling_params
from octavo.errors import RequestError
from octavo.logging import init_logger
from octavo.tokenizers import Tokenizer
from octavo.types import EngineCoreRequest, RequestOutputKind, SamplingParams

__all__ = ["EngineInputs", "InputProcessor"]

logger = init_logger(__name__)

_CACHE_SALT = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
# Texts with at most so many characters for each token that fits are encoded without a closer look.
_CHARACTERS_A_TOKEN = 16
# Text that is to be truncated is encoded whole, whatever fits: about a second of work, and half a GB of memory for as
# long as it takes, for so many characters.
_MOST_TRUNCATED_CHARACTERS = 2**22
# Each choice has a copy of the prompt and of the parameters in the engine. So many tokens may be in all copies of one
# prompt, and the parameters may take so many bytes on their way.
_MOST_COPIED_TOKENS = 2**22
_MOST_COPIED_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class EngineInputs:
    """A request that has passed every check.

    Attributes:
        request_id: the caller's id.
        prompt: the prompt's text, where it was given as text; all of it, even where its ids are truncated.
        params: a copy of the caller's parameters, with ``seed``, ``max_tokens`` and ``bad_words_token_ids`` filled in.
        requests: one for each choice, in order of index.
        num_truncated_prompt_tokens: cut from the beginning of the prompt, because ``truncate_prompt_tokens`` says so.
    """

    request_id: str
    prompt: str | None
    params: SamplingParams
    requests: list[EngineCoreRequest]
    num_truncated_prompt_tokens: int = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.requests[0].prompt_token_ids


class InputProcessor:
    """Checks requests and makes EngineCoreRequests of them. Thread-safe.

    Attributes:
        max_model_len: longest prompt plus output, tokens. The engine may lower it when it has sized the cache.

    Raises:
        ConfigError: a custom logits processor cannot be loaded.
    """

    def __init__(self, config: OctavoConfig, tokenizer: Tokenizer) -> None:
        self.max_model_len = config.model.max_model_len
        self._model = config.model
        self._by_priority = config.scheduler.policy == "priority"
        self._tokenizer = tokenizer
        self._custom = CustomProcessors(config.model.logits_processors)
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
        params: SamplingParams | None,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        output_kind: RequestOutputKind | None = None,
        add_special_tokens: bool = True,
    ) -> EngineInputs:
        """Checks everything and encodes the prompt's text; this may take a while and is best done off the event loop.

        Args:
            params: None: the model's defaults, whose ``max_tokens`` gives way to the model's length.
            arrival_time: seconds of time.monotonic(); None: now.
            output_kind: instead of the one that ``params`` says.
            add_special_tokens: put around a prompt of text what the checkpoint puts around texts.

        Raises:
            RequestError: the request cannot be served as sent; it names the field.
            RequestFailedError: a custom logits processor failed when it was asked about it.
        """
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        if not isinstance(request_id, str) or not request_id:
            refuse("request_id", f"request_id must be a string that is not empty, got {shown(request_id)}")
        check_unicode("request_id", request_id)
        self._check_priority(priority)
        text, given_ids, prompt_salt = split_prompt(prompt)
        salt = _checked_salt(cache_salt, prompt_salt)
        stated = params is not None
        params = self._checked_params(params)
        params.output_kind = params.output_kind if output_kind is None else output_kind
        to_keep = self._num_tokens_to_keep(params)
        if given_ids is None:
            token_ids = self._encode(text or "", to_keep, add_special_tokens)
        else:
            token_ids = self._checked_ids(given_ids, to_keep)
        num_truncated = 0 if to_keep is None else max(len(token_ids) - to_keep, 0)
        token_ids = token_ids[num_truncated:]
        self._complete(params, len(token_ids), stated)
        requests = self._requests(request_id, token_ids, params, arrival_time, priority, salt)
        return EngineInputs(request_id, text, params, requests, num_truncated)

    def _requests(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        arrival_time: float,
        priority: int,
        salt: str | None,
    ) -> list[EngineCoreRequest]:
        """One for each choice. The prompt's logprobs are the same for all: only the first choice computes them."""
        first = params
        others = first if params.prompt_logprobs is None else msgspec.structs.replace(params, prompt_logprobs=None)
        return [
            EngineCoreRequest(
                request_id=request_id if params.n == 1 else f"{index}_{request_id}",
                prompt_token_ids=token_ids,
                sampling_params=first if index == 0 else others,
                eos_token_ids=self._eos_token_ids(params),
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=salt,
                choice_index=index,
            )
            for index in range(params.n)
        ]

    def _eos_token_ids(self, params: SamplingParams) -> list[int]:
        return [] if params.ignore_eos else list(self._model.eos_token_ids)

    def _check_priority(self, priority: Any) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int) or not _INT64_MIN <= priority <= _INT64_MAX:
            refuse("priority", f"priority must be an integer between {_INT64_MIN} and {_INT64_MAX}")
        if priority != 0 and not self._by_priority:
            refuse("priority", "priority needs a server that was started with --scheduling-policy priority")

    # ---- parameters -------------------------------------------------------------------------------------------------

    def _checked_params(self, params: SamplingParams | None) -> SamplingParams:
        """A copy that this model can serve, whatever the prompt is, with ``bad_words_token_ids`` complete."""
        if params is None:
            params = default_sampling_params(self._model, self.max_model_len)
        elif not isinstance(params, SamplingParams):
            refuse("sampling_params", f"sampling_params must be SamplingParams, got {type(params).__name__}")
        # clone() also brings fields that were assigned after construction into their usual form, and checks them.
        params = params.clone()
        params.bad_words_token_ids = [list(sequence) for sequence in params.bad_words_token_ids]
        vocab_size = self._model.vocab_size
        check_params(params, self._model, self.max_model_len)
        if params.bad_words:
            encoded = encode_bad_words(params.bad_words, self._tokenizer)
            for sequence in encoded:
                check_ids("bad_words", sequence, vocab_size)  # the tokenizer may be wider than the model
            try:
                params = msgspec.structs.replace(params, bad_words_token_ids=params.bad_words_token_ids + encoded)
            except RequestError as error:
                refuse("bad_words", f"bad_words, as token ids: {error}")
        check_something_is_left(params, self._eos_token_ids(params), vocab_size)
        self._custom.take(params)
        return params

    def _num_tokens_to_keep(self, params: SamplingParams) -> int | None:
        """How many tokens of the prompt are kept at most; None: all."""
        if params.truncate_prompt_tokens != -1:
            return params.truncate_prompt_tokens
        return max(self.max_model_len - (params.max_tokens or 1), 1)

    # ---- prompts ----------------------------------------------------------------------------------------------------

    def _encode(self, text: str, to_keep: int | None, add_special_tokens: bool) -> list[int]:
        if not text:
            refuse("prompt", "prompt must not be empty")
        if to_keep is None:
            if len(text) > self.max_model_len * _CHARACTERS_A_TOKEN:
                self._check_characters(len(text))
        elif len(text) > _MOST_TRUNCATED_CHARACTERS:
            message = f"the prompt has {len(text)} characters; to be truncated it may have {_MOST_TRUNCATED_CHARACTERS}"
            refuse("prompt", message)
        check_unicode("prompt", text)
        token_ids = self._tokenizer.encode(text, add_special_tokens)
        if not token_ids:
            refuse("prompt", "prompt must not be empty: its text has no tokens")
        vocab_size = self._model.vocab_size
        if (highest := max(token_ids)) >= vocab_size:  # the tokenizer may be wider than the model
            message = (
                f"the prompt has the token {shown(self._tokenizer.decode_token(highest))} with id {highest}, but the "
                f"model's vocabulary is 0 to {vocab_size - 1}; leave that text out"
            )
            refuse("prompt", message)
        return token_ids

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
            refuse("input_tokens", message)

    def _checked_ids(self, token_ids: Any, to_keep: int | None) -> list[int]:
        if not isinstance(token_ids, list | tuple):
            refuse("prompt", f"prompt_token_ids must be a list of token ids, got {type(token_ids).__name__}")
        if not token_ids:
            refuse("prompt", "prompt must not be empty")
        vocab_size = self._model.vocab_size
        # A longer one is refused for its length, in any case, unless it is truncated.
        if to_keep is not None or len(token_ids) <= self.max_model_len:
            if set(map(type, token_ids)) != {int}:
                wrong = next(token_id for token_id in token_ids if type(token_id) is not int)
                refuse("prompt", f"prompt token ids must be integers, got {shown(wrong)}")
            low, high = min(token_ids), max(token_ids)
            if low < 0 or high >= vocab_size:
                message = (
                    f"prompt token ids must be ids of the vocabulary, 0 to {vocab_size - 1}; "
                    f"got {shown(low if low < 0 else high)}"
                )
                refuse("prompt", message)
        return list(token_ids)

    def _complete(self, params: SamplingParams, num_prompt_tokens: int, stated: bool) -> None:
        """Fills in ``max_tokens`` and ``seed``, once it is known that prompt and output fit.

        Args:
            stated: the parameters are the caller's own, not the defaults.
        """
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            message = (
                f"the prompt has {num_prompt_tokens} tokens, but this model's maximum context length is "
                f"{self.max_model_len} tokens, output included; shorten the prompt"
            )
            refuse("input_tokens", message)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if not stated:
            max_tokens = min(max_tokens, room)
        if max_tokens > room:
            message = (
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together "
                f"{num_prompt_tokens + max_tokens}, but this model's maximum context length is {self.max_model_len} "
                f"tokens; shorten the prompt, or lower max_tokens to at most {room}"
            )
            refuse("input_tokens", message)
        if params.min_tokens > max_tokens:
            message = f"min_tokens is {params.min_tokens}, but the prompt leaves room for {max_tokens} tokens"
            refuse("min_tokens", message)
        _check_copies(params, num_prompt_tokens)
        check_prompt_logprobs(params, num_prompt_tokens, self._model.vocab_size)
        check_output_logprobs(params, max_tokens, self._model.vocab_size)
        params.max_tokens = max_tokens
        if params.seed is None:
            params.seed = self._draw_seed()

    def _draw_seed(self) -> int:
        """The seed of the next request that has none: a function of the engine's seed and a running number."""
        key = f"{self._model.seed}:{next(self._request_counter)}".encode()
        # 63 bits: never negative, for -1 means "no seed" to SamplingParams.
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def _check_copies(params: SamplingParams, num_prompt_tokens: int) -> None:
    """Refuses more choices than the engine has room for."""
    if params.n == 1:
        return
    num_tokens, num_bytes = params.n * num_prompt_tokens, params.n * len(msgspec.msgpack.encode(params))
    if num_tokens > _MOST_COPIED_TOKENS:
        message = (
            f"n is {params.n} and the prompt has {num_prompt_tokens} tokens, together {num_tokens} in all choices, but "
            f"at most {_MOST_COPIED_TOKENS} are taken; lower n to at most "
            f"{max(_MOST_COPIED_TOKENS // num_prompt_tokens, 1)}"
        )
        refuse("n", message)
    if num_bytes > _MOST_COPIED_BYTES:
        message = (
            f"n is {params.n} and the parameters take {num_bytes // params.n} bytes, together {num_bytes} in all "
            f"choices, but at most {_MOST_COPIED_BYTES} are taken; lower n, or shorten the longest list"
        )
        refuse("n", message)


def _checked_salt(argument: Any, with_prompt: Any) -> str | None:
    """The cache salt, which may come either way."""
    if argument is not None and with_prompt is not None:
        refuse("cache_salt", "cache_salt is given twice: with the prompt and as an argument")
    salt = argument if argument is not None else with_prompt
    if salt is not None and (not isinstance(salt, str) or not _CACHE_SALT.fullmatch(salt)):
        refuse("cache_salt", "cache_salt must be 1 to 128 characters of A-Z a-z 0-9 . _ : -")
    return salt
