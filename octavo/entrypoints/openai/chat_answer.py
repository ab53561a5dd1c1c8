"""One chat's way back: from the engine's outputs to messages, whole or in chunks."""

import functools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from octavo.entrypoints.openai.chat_request import ChatCompletionRequest
from octavo.entrypoints.openai.generation import TokenCount, in_turn
from octavo.entrypoints.openai.logprobs import LogprobForms
from octavo.entrypoints.openai.reasoning_split import ReasoningSplit
from octavo.entrypoints.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChunkEvents,
    TextEvents,
)
from octavo.tokenizers import Tokenizer
from octavo.types import CompletionOutput, PromptLogprobTables, RequestOutput

if TYPE_CHECKING:
    from octavo.engine import EngineInputs

__all__ = ["ChatAnswer"]


class ChatAnswer:
    """Args:

    request: what was asked for.
    request_id: shown in the answer.
    model: the name to answer under.
    inputs: the rendered prompt.
    tokenizer: of the model.
    split: tells reasoning from content.
    """

    def __init__(
        self,
        request: ChatCompletionRequest,
        request_id: str,
        model: str,
        inputs: "EngineInputs",
        tokenizer: Tokenizer,
        split: ReasoningSplit,
    ) -> None:
        self._request = request
        self._inputs = inputs
        self._split = split
        every_entry = request.top_logprobs == -1 or request.logprob_token_ids is not None
        num_top = None if every_entry else request.top_logprobs or 0
        self._forms = LogprobForms(tokenizer, num_top, bool(request.return_tokens_as_token_ids))
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self.has_tables = request.has_logprobs or bool(request.logprobs)
        # A stream has nothing but the text of one choice, once that has begun.
        self._is_one_text = inputs.params.n == 1 and not (
            self.has_tables or request.return_token_ids or split.active or request.continuous_usage()
        )
        self.token_count = TokenCount(len(inputs.prompt_token_ids), split.count_tokens(tokenizer))
        self._echo = request.echoed_text()
        self._prompt_token_ids = inputs.prompt_token_ids if request.return_token_ids else UNSET

    async def collect(self, outputs: AsyncGenerator[RequestOutput, None]) -> ChatCompletion:
        """The whole answer."""
        choices: list[ChatChoice] = []
        tables: PromptLogprobTables | None = None
        async with aclosing(outputs):
            async for output in outputs:
                self.token_count.add(output)
                choices += await in_turn(functools.partial(self._choices, output), self.has_tables)
                tables = output.prompt_logprobs
        answer = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self.token_count.usage(),
            prompt_token_ids=self._prompt_token_ids,
            prompt_truncated_tokens=self._inputs.num_truncated_prompt_tokens or UNSET,
        )
        if self._request.prompt_logprobs is not None and tables is not None:
            token_ids = self._inputs.prompt_token_ids
            form = functools.partial(LogprobForms.prompt, token_ids, tables, self._request.prompt_logprobs)
            answer.prompt_logprobs = await in_turn(form, self.has_tables)
        return answer

    def _choices(self, output: RequestOutput) -> list[ChatChoice]:
        return [self._choice(choice) for choice in output.outputs]

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        reasoning, content = self._split(output)
        message = ChatMessage("assistant", self._echo + content)
        if self._split.active:
            message.reasoning = message.reasoning_content = reasoning or None
        logprobs = self._forms.chat(output)
        choice = ChatChoice(output.index, message, logprobs, output.finish_reason, output.stop_reason)
        if self._request.return_token_ids:
            choice.token_ids = output.token_ids
        return choice

    async def stream(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[bytes, None]:
        """Its events; what an output gives rise to comes at once."""
        with_usage = self._request.continuous_usage()
        first, others = self._chunk_events(self._prompt_token_ids), self._chunk_events(UNSET)
        begun: set[int] = set()
        texts: TextEvents | None = None
        async with aclosing(outputs):
            async for output in outputs:
                if texts is not None and not output.finished:
                    self.token_count.add(output)
                    if text := output.outputs[0].text:
                        yield texts.encode(text)
                    continue
                events = []
                for part in output.outputs:
                    if part.index not in begun:
                        choice = ChatChunkChoice(part.index, ChatDelta("assistant", self._echo))
                        usage = self.token_count.usage() if with_usage else None
                        events.append((others if begun else first).encode([choice], usage))
                        begun.add(part.index)
                self.token_count.add(output)
                usage = self.token_count.usage() if with_usage else None
                for part in output.outputs:
                    events += [others.encode([choice], usage) for choice in self._chunks(part, with_usage)]
                if events:
                    yield b"".join(events)
                if begun and self._is_one_text:
                    texts = others.of_text(ChatChunkChoice(0, ChatDelta(content="")))
        if self._request.include_usage():
            yield others.encode([], self.token_count.usage())

    def _chunk_events(self, prompt_token_ids: list[int] | UnsetType) -> ChunkEvents:
        chunk = ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[],
            prompt_token_ids=prompt_token_ids,
            prompt_truncated_tokens=self._inputs.num_truncated_prompt_tokens or UNSET,
        )
        return ChunkEvents(chunk)

    def _chunks(self, part: CompletionOutput, with_usage: bool) -> list[ChatChunkChoice]:
        """What came, reasoning and content apart; and in a chunk of its own that it has ended."""
        reasoning, content = self._split(part)
        token_ids = part.token_ids if self._request.return_token_ids else None
        deltas = [ChatDelta(reasoning=reasoning, reasoning_content=reasoning)] if reasoning else []
        told_without_text = part.logprobs or token_ids or (with_usage and not part.finished)
        if content or (not deltas and told_without_text):
            deltas.append(ChatDelta(content=content))
        chunks = [ChatChunkChoice(part.index, delta) for delta in deltas]
        if chunks:
            chunks[0].logprobs = self._forms.chat(part)
            chunks[0].token_ids = token_ids or UNSET
        if part.finished:
            chunks.append(ChatChunkChoice(part.index, ChatDelta(), None, part.finish_reason, part.stop_reason))
        return chunks
