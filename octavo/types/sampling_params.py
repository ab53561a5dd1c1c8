"""What a request may ask of the sampler and of its text, and the one place where it is checked."""

import difflib
from enum import IntEnum
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.types.checks import (
    check_boolean,
    check_integer,
    check_integers,
    check_number,
    check_numbers,
    check_short_list,
    check_strings,
    wrong,
)

__all__ = ["MAX_CHOICES", "RequestOutputKind", "SamplingParams"]

MAX_CHOICES = 16384
# Every stop string is looked for in the text of every token, and all of them are kept for each choice.
_MOST_STOP_STRINGS, _LONGEST_STOP_STRING = 128, 1024
_MOST_STOP_TOKEN_IDS = 1024
_MOST_BAD_WORDS, _LONGEST_BAD_WORD = 128, 1024
_MOST_LOGPROB_TOKEN_IDS = 1024
_MOST_BIASES = _MOST_ALLOWED_TOKEN_IDS = 1 << 20
_SEED_MIN, _SEED_MAX = -(2**63), 2**63 - 1
_TOKEN_COUNT_MAX = 2**31 - 1
_LONGEST_ID = 10  # decimal digits
# Below this temperature the distribution is a point mass in float32; vLLM treats it as greedy too.
GREEDY_TEMPERATURE = 1e-5


class RequestOutputKind(IntEnum):
    """What each ``RequestOutput`` of a request carries."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, at the end


class _KnowsItsNames(msgspec.StructMeta):
    """The class of a Struct whose parameters people write by hand."""

    def __call__(cls, *args: Any, **stated: Any) -> Any:  # noqa: N805 (of a class of classes)
        for name in stated:
            if name not in cls.__struct_fields__:
                close = difflib.get_close_matches(name, cls.__struct_fields__, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(cls.__struct_fields__))}"
                raise TypeError(f"{cls.__name__} has no parameter {name!r}; {hint}")
        return super().__call__(*args, **stated)


class SamplingParams(msgspec.Struct, metaclass=_KnowsItsNames, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request, with vLLM's names and meanings.

    A row's logits are changed in this order: repetition, frequency and presence penalty; logit_bias; what must not be
    sampled (allowed_token_ids, bad_words, min_tokens); custom logits processors; temperature; min_p; top_k; top_p.

    Attributes:
        n: number of choices to generate from the prompt.
        presence_penalty: -2 to 2; subtracted from the logit of every token that has been generated.
        frequency_penalty: -2 to 2; subtracted once for each time that the token has been generated.
        repetition_penalty: above 0; logits of tokens in the prompt or the output are divided by it where positive,
            multiplied where negative. 1: none.
        temperature: 0 to 2; below 1e-5 the most likely token is taken (ties: the lower id).
        top_p: keep the smallest set of most likely tokens whose probability reaches ``top_p``; (0, 1].
        top_k: keep the ``top_k`` most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least ``min_p`` times as probable as the most likely one; 0 to 1.
        seed: key of the request's random numbers (int64). Same seed, same text, whatever else is in the batch.
            ``None``: the engine draws one at the door.
        logit_bias: token id → what is added to its logit, -100 to 100. Ids may be given as strings.
        allowed_token_ids: only these may be generated.
        bad_words: at most 128 texts of at most 1024 characters that are not generated: the last token of one is not
            sampled where the tokens before it have just been.
        bad_words_token_ids: the same as token ids; filled in from ``bad_words`` at the door.
        stop: strings that end the generation; they are not part of the returned text. At most 128 of at most 1024
            characters.
        stop_token_ids: token ids that end the generation, at most 1024.
        include_stop_str_in_output: the stop string, or the stop token's text, is part of the returned text.
        ignore_eos: go on past the model's own end-of-sequence tokens.
        max_tokens: most tokens to generate; ``None``: as many as the model's length leaves.
        min_tokens: end-of-sequence, ``stop_token_ids`` and ``stop`` do not act before so many tokens.
        logprobs: return the log-probabilities of so many most likely tokens, and of the sampled one, at every
            position; of the raw distribution, before penalties, temperature and filters. -1: of the whole vocabulary.
        prompt_logprobs: the same for every token of the prompt but the first. Such a request does not read the prefix
            cache.
        logprob_token_ids: at every position, instead of the most likely tokens' the log-probabilities of these.
        detokenize: False: no text is made (stop strings need text).
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: False: special tokens that are shown are not set apart by spaces, where the
            tokenizer would. (Byte-level and SentencePiece tokenizers never do.)
        truncate_prompt_tokens: keep only the last so many tokens of the prompt; -1: as many as the model's length
            leaves for ``max_tokens``. The output says how many were cut.
        extra_args: arguments of custom logits processors.
        output_kind: see RequestOutputKind.

    Raises:
        RequestError: (a ValueError) for a value out of range; it names the parameter.
        TypeError: there is no such parameter.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    bad_words_token_ids: list[list[int]] = []
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    extra_args: dict[str, Any] = {}
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name in ("stop", "stop_token_ids", "bad_words", "bad_words_token_ids"):
            if getattr(self, name) is None:
                setattr(self, name, [])
        for name in ("logit_bias", "extra_args"):
            if getattr(self, name) is None:
                setattr(self, name, {})
        if self.top_k == -1:
            self.top_k = 0
        if self.seed == -1:
            self.seed = None
        if isinstance(self.logit_bias, dict):
            self.logit_bias = _with_integer_keys(self.logit_bias)
        self.verify()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken at every position."""
        return self.temperature < GREEDY_TEMPERATURE

    def clone(self) -> "SamplingParams":
        """A copy that shares no list or dict with this one."""
        return msgspec.structs.replace(
            self,
            **{
                name: value.copy()
                for name, value in msgspec.structs.asdict(self).items()
                if isinstance(value, list | dict)
            },
        )

    def verify(self) -> None:
        """Raises RequestError for the first field that has a wrong type or is out of range."""
        check_integer("n", self.n, 1, MAX_CHOICES)
        self._verify_distribution()
        self._verify_tokens()
        self._verify_stops()
        self._verify_lengths()
        self._verify_logprobs()
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            check_boolean(name, getattr(self, name))
        check_boolean("spaces_between_special_tokens", self.spaces_between_special_tokens)
        if not isinstance(self.extra_args, dict) or not all(isinstance(key, str) for key in self.extra_args):
            raise wrong("extra_args", self.extra_args, "an object")
        if self.n > 1 and self.greedy:
            message = f"n must be 1 when temperature is 0 (all choices would be equal), got {self.n}"
            raise RequestError(message, param="n")
        if not self.detokenize and self.stop:
            raise RequestError("stop needs text, but detokenize is false", param="stop")

    def _verify_distribution(self) -> None:
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 1000.0, low_open=True)
        check_number("temperature", self.temperature, 0.0, 2.0)
        check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_integer("top_k", self.top_k, 0, _TOKEN_COUNT_MAX, note=" (0 or -1 keeps all tokens)")
        check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_integer("seed", self.seed, _SEED_MIN, _SEED_MAX)

    def _verify_tokens(self) -> None:
        """What may and what must not be generated."""
        if not isinstance(self.logit_bias, dict):
            raise wrong("logit_bias", self.logit_bias, "an object of token ids and numbers")
        if len(self.logit_bias) > _MOST_BIASES:
            message = f"logit_bias must have at most {_MOST_BIASES} entries, got {len(self.logit_bias)}"
            raise RequestError(message, param="logit_bias")
        check_integers("logit_bias", self.logit_bias, 0, _TOKEN_COUNT_MAX)
        check_numbers("logit_bias", self.logit_bias.values(), -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids, _MOST_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        check_strings("bad_words", self.bad_words, _MOST_BAD_WORDS, _LONGEST_BAD_WORD, "a list of strings")
        check_short_list("bad_words_token_ids", self.bad_words_token_ids, 2 * _MOST_BAD_WORDS, "words", "a list")
        for word in self.bad_words_token_ids:
            _check_ids("bad_words_token_ids", word, _LONGEST_BAD_WORD)
            if not word:
                raise RequestError("bad_words_token_ids must not contain an empty list", param="bad_words_token_ids")

    def _verify_stops(self) -> None:
        check_strings("stop", self.stop, _MOST_STOP_STRINGS, _LONGEST_STOP_STRING, "a string or a list of strings")
        _check_ids("stop_token_ids", self.stop_token_ids, _MOST_STOP_TOKEN_IDS)

    def _verify_lengths(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, _TOKEN_COUNT_MAX)
        check_integer("min_tokens", self.min_tokens, 0, _TOKEN_COUNT_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens ({self.min_tokens}) must not be larger than max_tokens ({self.max_tokens})"
            raise RequestError(message, param="min_tokens")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            note = " (or -1: as many as fit)"
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, _TOKEN_COUNT_MAX, note)

    def _verify_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                check_integer(name, value, -1, _TOKEN_COUNT_MAX, " (-1: the whole vocabulary)")
        if self.logprob_token_ids is None:
            return
        _check_ids("logprob_token_ids", self.logprob_token_ids, _MOST_LOGPROB_TOKEN_IDS)
        if self.logprobs not in (None, 0):
            message = "logprob_token_ids takes the place of the most likely tokens; leave logprobs out"
            raise RequestError(message, param="logprob_token_ids")


def _check_ids(name: str, value: Any, most: int) -> None:
    check_short_list(name, value, most, "token ids", "a list of token ids")
    check_integers(name, value, 0, _TOKEN_COUNT_MAX)


def _with_integer_keys(bias: dict[Any, float]) -> dict[int, float]:
    """JSON has no other keys than strings. A million are looked at one by one only where something is wrong."""
    kinds = set(map(type, bias))
    if kinds <= {int}:
        return dict(bias)
    if kinds == {str} and "" not in bias and max(map(len, bias)) <= _LONGEST_ID:
        digits = "".join(bias)
        by_id = dict(zip(map(int, bias), bias.values(), strict=True)) if digits.isascii() and digits.isdecimal() else {}
        if len(by_id) == len(bias):
            return by_id
    found: dict[int, float] = {}
    for key, value in bias.items():
        plain = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= _LONGEST_ID
        token_id = int(key) if plain else key
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"logit_bias must have token ids as keys, got {key!r:.60}", param="logit_bias")
        if token_id in found:
            raise RequestError(f"logit_bias has the token id {token_id} twice", param="logit_bias")
        found[token_id] = value
    return found
