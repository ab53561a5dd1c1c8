"""POST /v1/completions: one or many prompts, as text or token ids, to choices."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import UNSET

from octavo.entrypoints.openai.generation import TokenCount, merge_outputs, process_prompts
from octavo.entrypoints.openai.logprobs import completion_logprobs
from octavo.entrypoints.openai.protocol import COMPLETION_MAX_TOKENS, CompletionRequest
from octavo.entrypoints.openai.responses import Completion, CompletionChoice, event
from octavo.entrypoints.openai.serving_models import OpenAIServingModels
from octavo.errors import RequestError
from octavo.types import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from octavo.engine import AsyncLLM, EngineInputs

__all__ = ["OpenAIServingCompletion"]

_MOST_PROMPTS = 1024


class OpenAIServingCompletion:
    """Args:

    engine: a loaded engine.
    models: which names it is served under.
    """

    request_kind = CompletionRequest
    id_prefix = "cmpl-"

    def __init__(self, engine: "AsyncLLM", models: OpenAIServingModels) -> None:
        self._engine = engine
        self._models = models

    async def create(
        self, request: CompletionRequest, request_id: str, arrival_time: float
    ) -> Completion | AsyncGenerator[bytes, None]:
        """The completion; or with ``stream`` its events, when all has been checked and nothing started yet."""
        model = self._models.served_name(request.model)
        params = request.sampling_params()
        prompts = _split(request.prompt)
        inputs = await process_prompts(self._engine, prompts, params, request, request_id, arrival_time)
        if request.max_tokens is None:
            for item in inputs:  # it has all the room that is left
                assert item.params.max_tokens is not None
                item.params.max_tokens = min(item.params.max_tokens, COMPLETION_MAX_TOKENS)
        answer = _Answer(request, request_id, model, inputs)
        outputs = merge_outputs(self._engine, inputs)
        return answer.stream(outputs) if request.stream else await answer.collect(outputs)


class _Answer:
    """One request's way back."""

    def __init__(self, request: CompletionRequest, request_id: str, model: str, inputs: "list[EngineInputs]") -> None:
        self._request = request
        self._num_top = request.logprobs or 0
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._n = inputs[0].params.n
        self._count = TokenCount(sum(len(item.prompt_token_ids) for item in inputs))
        self._offsets: dict[int, int] = {}  # characters of the tokens so far, by choice

    async def collect(self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> Completion:
        choices = []
        async with aclosing(outputs):
            async for prompt_index, output in outputs:
                self._count.add(prompt_index, output)
                choices += [self._choice(prompt_index, choice) for choice in output.outputs]
        choices.sort(key=lambda choice: choice.index)
        return self._body(choices, with_usage=True)

    async def stream(self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        with_usage = self._request.continuous_usage()
        async with aclosing(outputs):
            async for prompt_index, output in outputs:
                self._count.add(prompt_index, output)
                for part in output.outputs:
                    if part.text or part.finished or part.logprobs or with_usage:
                        yield event(self._body([self._choice(prompt_index, part)], with_usage))
        if self._request.include_usage():
            yield event(self._body([], with_usage=True))

    def _choice(self, prompt_index: int, part: CompletionOutput) -> CompletionChoice:
        index = prompt_index * self._n + part.index
        logprobs = completion_logprobs(part, self._num_top, self._offsets.get(index, 0))
        if logprobs is not None and logprobs.tokens:
            self._offsets[index] = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        return CompletionChoice(index, part.text, logprobs, part.finish_reason, part.stop_reason)

    def _body(self, choices: list[CompletionChoice], with_usage: bool) -> Completion:
        usage = self._count.usage() if with_usage else UNSET
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


def _split(prompt: str | list[Any] | None) -> list[Any]:
    """The prompts of a request in the engine's form. Entries of token id lists are checked there."""
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
