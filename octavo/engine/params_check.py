"""Sampling parameters against the model's facts: what SamplingParams cannot know by itself, whatever the prompt is."""

from collections.abc import Collection

from octavo.config import ModelConfig
from octavo.engine.prompts import check_unicode, refuse
from octavo.types import SamplingParams

__all__ = ["check_output_logprobs", "check_params", "check_prompt_logprobs", "check_something_is_left"]

# A prompt's logprobs are objects of about 200 bytes, all of them kept until the request ends.
_MOST_PROMPT_LOGPROBS = 2**22
# Of a token's logprobs so many cost little more than the token. Beyond that (--max-logprobs) the sum counts: whole
# vocabularies take a tenth of a second a token, from everybody.
_FEW_LOGPROBS = 128
_MOST_OUTPUT_LOGPROBS = 2**21


def check_params(params: SamplingParams, model: ModelConfig, max_model_len: int) -> None:
    """Raises RequestError for the first parameter that this model cannot serve."""
    for name in ("stop", "bad_words"):
        for text in getattr(params, name):
            check_unicode(name, text)
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
        check_ids(name, getattr(params, name) or (), model.vocab_size)
    for word in params.bad_words_token_ids:
        check_ids("bad_words_token_ids", word, model.vocab_size)
    _check_num_logprobs("logprobs", params.logprobs, model)
    _check_num_logprobs("prompt_logprobs", params.prompt_logprobs, model)
    if params.max_tokens is not None and params.max_tokens > max_model_len:
        message = f"max_tokens is {params.max_tokens}, but the model's context length is {max_model_len} tokens"
        refuse("max_tokens", message)


def check_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and (highest := max(token_ids)) >= vocab_size:
        refuse(name, f"{name} must be ids of the vocabulary, 0 to {vocab_size - 1}; got {highest}")


def check_something_is_left(params: SamplingParams, eos_token_ids: Collection[int], vocab_size: int) -> None:
    """Refuses parameters that together leave no token to begin with. ``bad_words_token_ids`` is complete."""
    forbidden = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    if params.min_tokens:
        forbidden.update(eos_token_ids, params.stop_token_ids)
    if params.allowed_token_ids is None:
        nothing_left = len(forbidden) >= vocab_size
    else:
        nothing_left = forbidden.issuperset(params.allowed_token_ids)
    if nothing_left:
        by_length = " and what min_tokens does not let end it yet" if params.min_tokens else ""
        name = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
        refuse(name, f"{name}: without bad_words{by_length}, no token is left that may be generated")


def check_prompt_logprobs(params: SamplingParams, num_prompt_tokens: int, vocab_size: int) -> None:
    """Refuses tables of more entries than a front end can keep."""
    if params.prompt_logprobs is None:
        return
    width = 1 + (vocab_size if params.prompt_logprobs == -1 else min(params.prompt_logprobs, vocab_size))
    if num_prompt_tokens * width > _MOST_PROMPT_LOGPROBS:
        message = (
            f"prompt_logprobs: {width} for each of {num_prompt_tokens} tokens is more than the {_MOST_PROMPT_LOGPROBS} "
            "that are given; ask for fewer, or shorten the prompt"
        )
        refuse("prompt_logprobs", message)


def check_output_logprobs(params: SamplingParams, max_tokens: int, vocab_size: int) -> None:
    """Refuses an output whose tables would be too large by the time that ``max_tokens`` tokens have come."""
    if params.logprobs is None:
        return
    width = vocab_size if params.logprobs == -1 else min(params.logprobs, vocab_size)
    if width > _FEW_LOGPROBS and params.n * max_tokens * (1 + width) > _MOST_OUTPUT_LOGPROBS:
        most = max(_MOST_OUTPUT_LOGPROBS // (1 + width) // params.n, 1)
        message = (
            f"logprobs: {width} for each of up to {max_tokens} tokens in {params.n} choices is more than the "
            f"{_MOST_OUTPUT_LOGPROBS} that are given; set max_tokens to at most {most}, or ask for fewer"
        )
        refuse("logprobs", message)


def _check_num_logprobs(name: str, value: int | None, model: ModelConfig) -> None:
    if value is None or model.max_logprobs == -1:
        return
    if value == -1 and model.max_logprobs < model.vocab_size:
        message = (
            f"{name} is -1, which is the whole vocabulary of {model.vocab_size} tokens, but at most "
            f"{model.max_logprobs} may be asked for (--max-logprobs)"
        )
        refuse(name, message)
    if value > model.max_logprobs:
        refuse(name, f"{name} must be at most {model.max_logprobs} (--max-logprobs), got {value}")
