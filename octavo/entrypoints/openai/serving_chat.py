"""POST /v1/chat/completions: messages, rendered with the model's chat template, to an assistant's message."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from msgspec import UNSET

from octavo.entrypoints.openai.generation import TokenCount, merge_outputs, process_prompts
from octavo.entrypoints.openai.logprobs import chat_logprobs
from octavo.entrypoints.openai.protocol import ChatCompletionRequest
from octavo.entrypoints.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    event,
)
from octavo.entrypoints.openai.serving_models import OpenAIServingModels
from octavo.errors import RequestError
from octavo.parsers import ReasoningFormat, ReasoningStream
from octavo.tokenizers import Tokenizer
from octavo.types import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from octavo.engine import AsyncLLM, EngineInputs
    from octavo.renderers import RenderedPrompt

__all__ = ["OpenAIServingChat"]


class OpenAIServingChat:
    """Args:

    engine: a loaded engine.
    models: which names it is served under.
    render: ``ChatRenderer.render`` off the event loop.
    reasoning_format: how answers are split into reasoning and content; None: they are not.
    """

    request_kind = ChatCompletionRequest
    id_prefix = "chatcmpl-"

    def __init__(
        self,
        engine: "AsyncLLM",
        models: OpenAIServingModels,
        render: "Callable[..., Awaitable[RenderedPrompt]]",
        reasoning_format: ReasoningFormat | None = None,
    ) -> None:
        self._engine = engine
        self._models = models
        self._render = render
        self._reasoning_format = reasoning_format

    async def create(
        self, request: ChatCompletionRequest, request_id: str, arrival_time: float
    ) -> ChatCompletion | AsyncGenerator[bytes, None]:
        """The answer; or with ``stream`` its events, when all has been checked and nothing started yet."""
        model = self._models.served_name(request.model)
        try:
            params = request.sampling_params()
            rendered = await self._render(request.plain_messages(), template_kwargs=request.template_kwargs())
            prompt = {"prompt": rendered.text, "prompt_token_ids": rendered.token_ids}
            inputs = await process_prompts(self._engine, [prompt], params, request, request_id, arrival_time)
        except RequestError as error:
            raise type(error)(str(error), param=request.field_of(error.param)) from None
        split = _ReasoningSplit(self._reasoning_format, rendered.text)
        answer = _Answer(request, request_id, model, inputs[0], self._engine.tokenizer, split)
        outputs = merge_outputs(self._engine, inputs)
        return answer.stream(outputs) if request.stream else await answer.collect(outputs)


class _Answer:
    """One request's way back."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        request_id: str,
        model: str,
        inputs: "EngineInputs",
        tokenizer: Tokenizer,
        split: "_ReasoningSplit",
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._split = split
        self._num_top = request.top_logprobs or 0
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._count = TokenCount(len(inputs.prompt_token_ids))

    async def collect(self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> ChatCompletion:
        choices: list[ChatChoice] = []
        async with aclosing(outputs):
            async for prompt_index, output in outputs:
                self._count.add(prompt_index, output)
                choices += [self._choice(choice) for choice in output.outputs]
        return ChatCompletion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=self._count.usage()
        )

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        reasoning, content = self._split(output)
        message = ChatMessage("assistant", content)
        if self._split.active:
            message.reasoning = message.reasoning_content = reasoning or None
        logprobs = chat_logprobs(output, self._num_top, self._tokenizer)
        return ChatChoice(output.index, message, logprobs, output.finish_reason, output.stop_reason)

    async def stream(self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        with_usage = self._request.continuous_usage()
        begun: set[int] = set()
        async with aclosing(outputs):
            async for prompt_index, output in outputs:
                for part in output.outputs:
                    if part.index not in begun:
                        begun.add(part.index)
                        delta = ChatDelta("assistant", "")
                        yield self._event([ChatChunkChoice(part.index, delta)], with_usage)
                self._count.add(prompt_index, output)
                for part in output.outputs:
                    for choice in self._chunks(part, with_usage):
                        yield self._event([choice], with_usage)
        if self._request.include_usage():
            yield self._event([], with_usage=True)

    def _chunks(self, part: CompletionOutput, with_usage: bool) -> list[ChatChunkChoice]:
        """What came, reasoning and content apart; and in a chunk of its own that it has ended."""
        reasoning, content = self._split(part)
        deltas = [ChatDelta(reasoning=reasoning, reasoning_content=reasoning)] if reasoning else []
        if content or (not deltas and (part.logprobs or (with_usage and not part.finished))):
            deltas.append(ChatDelta(content=content))
        chunks = [ChatChunkChoice(part.index, delta) for delta in deltas]
        if chunks:
            chunks[0].logprobs = chat_logprobs(part, self._num_top, self._tokenizer)
        if part.finished:
            chunks.append(ChatChunkChoice(part.index, ChatDelta(), None, part.finish_reason, part.stop_reason))
        return chunks

    def _event(self, choices: list[ChatChunkChoice], with_usage: bool) -> bytes:
        usage = self._count.usage() if with_usage else UNSET
        return event(ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage))


class _ReasoningSplit:
    """Call it with each part of each choice, in order.

    Args:
        reasoning_format: None: everything is content.
        prompt: the rendered prompt.
    """

    def __init__(self, reasoning_format: ReasoningFormat | None, prompt: str) -> None:
        self._format = reasoning_format
        self._prompt = prompt
        self._streams: dict[int, ReasoningStream] = {}

    @property
    def active(self) -> bool:
        return self._format is not None

    def __call__(self, part: CompletionOutput) -> tuple[str, str]:
        """(reasoning, content) that ``part`` adds to its choice."""
        if self._format is None:
            return "", part.text
        stream = self._streams.get(part.index)
        if stream is None:
            stream = self._streams[part.index] = ReasoningStream(self._format, self._prompt)
        reasoning, content = stream.push(part.text)
        if part.finished:
            last = stream.finish()
            reasoning, content = reasoning + last.reasoning, content + last.content
        return reasoning, content
