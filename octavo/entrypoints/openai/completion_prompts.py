"""The prompts of a completion in the engine's form: text, token ids, lists of such, and texts with a gap to fill."""

import asyncio
from typing import Any, NoReturn

from octavo.entrypoints.openai.completion_request import CompletionRequest
from octavo.errors import RequestError
from octavo.tokenizers import Tokenizer

__all__ = ["completion_prompts"]

_MOST_PROMPTS = 1024
# Of all prompts, each with the suffix: they are encoded whole before anything else is known of them.
_MOST_GAP_CHARS = 1 << 22


async def completion_prompts(request: CompletionRequest, tokenizer: Tokenizer) -> list[Any]:
    """One entry a prompt.

    Raises:
        RequestError: they are malformed, or there is a suffix that this model does not take.
    """
    prompts = _split(request.prompt)
    if not request.suffix:
        return prompts
    if tokenizer.fill_in_middle is None:
        message = "suffix needs a model with fill-in-the-middle tokens, which this one does not have; leave it out"
        raise RequestError(message, param="suffix")
    num_chars = len(prompts) * len(request.suffix) + sum(map(len, prompts))
    if num_chars > _MOST_GAP_CHARS:
        message = f"prompts, each with the suffix, must have at most {_MOST_GAP_CHARS} characters, got {num_chars}"
        raise RequestError(message, param="suffix")
    return [await _with_gap(prompt, request.suffix, tokenizer) for prompt in prompts]


async def _with_gap(prompt: Any, suffix: str, tokenizer: Tokenizer) -> Any:
    if not isinstance(prompt, str):
        raise RequestError("suffix needs prompts of text, not of token ids", param="suffix")
    token_ids = await asyncio.to_thread(tokenizer.encode_fill_in_middle, prompt, suffix)
    return {"prompt": prompt, "prompt_token_ids": token_ids}


def _split(prompt: str | list[Any] | None) -> list[Any]:
    """Entries of token id lists are checked by the engine."""
    if prompt is None:
        _refuse("prompt is missing")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        _refuse("prompt must not be empty")
    first = prompt[0]
    if isinstance(first, int):
        return [{"prompt_token_ids": prompt}]
    if not isinstance(first, str | list):
        _refuse("prompt must be a string, a list of token ids, or a list of such")
    if len(prompt) > _MOST_PROMPTS:
        _refuse(f"prompt must be at most {_MOST_PROMPTS} prompts, got {len(prompt)}")
    kind = str if isinstance(first, str) else list
    for index, entry in enumerate(prompt):
        if not isinstance(entry, kind):
            _refuse(f"prompt {index}: all prompts must be strings, or all lists of token ids")
    return prompt if kind is str else [{"prompt_token_ids": entry} for entry in prompt]


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, param="prompt")
