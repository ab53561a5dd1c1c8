"""One completion's way back: from the engine's outputs to choices, whole or in chunks, with the prompt before each
where it is to be echoed."""

import functools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from octavo.entrypoints.openai.completion_request import CompletionRequest
from octavo.entrypoints.openai.generation import TokenCount, in_turn
from octavo.entrypoints.openai.logprobs import LogprobForms, TokenOffsets
from octavo.entrypoints.openai.responses import (
    ChunkEvents,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TextEvents,
    Usage,
)
from octavo.tokenizers import Tokenizer
from octavo.types import CompletionOutput, PromptLogprobTables, RequestOutput

if TYPE_CHECKING:
    from octavo.engine import EngineInputs

__all__ = ["CompletionAnswer"]


class CompletionAnswer:
    """Args:

    request: what was asked for.
    request_id: shown in the answer.
    model: the name to answer under.
    inputs: one for each prompt.
    tokenizer: of the model.
    """

    def __init__(
        self,
        request: CompletionRequest,
        request_id: str,
        model: str,
        inputs: "list[EngineInputs]",
        tokenizer: Tokenizer,
    ) -> None:
        self._request = request
        self._id = request_id
        self._model = model
        self._inputs = inputs
        self._tokenizer = tokenizer
        self._created = int(time.time())
        every_entry = request.logprobs == -1 or request.logprob_token_ids is not None
        num_top = None if every_entry else request.logprobs or 0
        self._forms = LogprobForms(tokenizer, num_top, bool(request.return_tokens_as_token_ids))
        self.has_tables = request.has_logprobs or request.logprobs is not None
        self.token_count = TokenCount(sum(len(item.prompt_token_ids) for item in inputs))
        self._prompt_only = request.prompt_only
        self._returns_token_ids = bool(request.return_token_ids)
        # A stream has nothing but the text of one choice, once that has begun.
        self._is_one_text = len(inputs) == inputs[0].params.n == 1 and not (
            self.has_tables or self._returns_token_ids or self._prompt_only or request.continuous_usage()
        )
        self._places = {item.request_id: index for index, item in enumerate(inputs)}
        self._echoes: dict[int, str] = {}  # text of the prompt, by prompt
        self._prompt_tables: dict[int, PromptLogprobTables] = {}  # by prompt
        self._offsets: dict[int, TokenOffsets] = {}  # by choice that has begun
        self.num_truncated = sum(item.num_truncated_prompt_tokens for item in inputs)

    async def collect(self, outputs: AsyncGenerator[RequestOutput, None]) -> Completion:
        """The whole answer."""
        choices: list[CompletionChoice] = []
        async with aclosing(outputs):
            async for output in outputs:
                choices += await in_turn(functools.partial(self._choices, output), self.has_tables)
        choices.sort(key=lambda choice: choice.index)
        return self._body(choices, self.token_count.usage())

    async def stream(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[bytes, None]:
        """Its events; what an output gives rise to comes at once."""
        with_usage = self._request.continuous_usage()
        chunks = ChunkEvents(self._body([], UNSET))
        texts: TextEvents | None = None
        async with aclosing(outputs):
            async for output in outputs:
                if texts is not None and not output.finished:
                    self.token_count.add(output)
                    if text := output.outputs[0].text:
                        yield texts.encode(text)
                    continue
                events = []
                choices = self._choices(output)
                usage = self.token_count.usage() if with_usage else None
                for choice in choices:
                    if choice.text or with_usage or _tells(choice):
                        events.append(chunks.encode([choice], usage))
                if events:
                    yield b"".join(events)
                if choices and self._is_one_text:
                    texts = chunks.of_text(CompletionChoice(choices[0].index, ""))
        if self._request.include_usage():
            yield chunks.encode([], self.token_count.usage())

    def _choices(self, output: RequestOutput) -> list[CompletionChoice]:
        """What an output adds to the choices of its prompt."""
        prompt_index = self._places[output.request_id]
        if self._prompt_only:
            output = replace(output, outputs=[_without_tokens(part) for part in output.outputs])
        if output.prompt_logprobs is not None:
            self._prompt_tables[prompt_index] = output.prompt_logprobs
        self.token_count.add(output)
        choices = []
        for part in output.outputs:  # no comprehension: it would be one more call a token
            choices.append(self._choice(prompt_index, part))
        return choices

    def _choice(self, prompt_index: int, part: CompletionOutput) -> CompletionChoice:
        inputs = self._inputs[prompt_index]
        index = prompt_index * inputs.params.n + part.index
        choice = CompletionChoice(index, part.text, None, part.finish_reason, part.stop_reason)
        if self._returns_token_ids:
            choice.token_ids = part.token_ids
        begins = index not in self._offsets
        if begins:
            self._begin(prompt_index, choice)
        if part.logprobs is not None:
            logprobs = self._forms.completion(part.token_ids, part.logprobs, self._offsets[index])
            if choice.logprobs is None:
                choice.logprobs = logprobs
            else:
                choice.logprobs.extend(logprobs)
        return choice

    def _begin(self, prompt_index: int, choice: CompletionChoice) -> None:
        """Puts before a choice's first text what was asked of the prompt."""
        request, inputs = self._request, self._inputs[prompt_index]
        begin = 0
        if request.echo:
            text = self._echoed_text(prompt_index)
            choice.text = text + choice.text
            begin = len(text)
            choice.logprobs = self._echoed_logprobs(prompt_index)
        self._offsets[choice.index] = TokenOffsets(self._tokenizer, inputs.params, begin)
        if request.return_token_ids:
            choice.prompt_token_ids = inputs.prompt_token_ids
        if request.prompt_logprobs is not None:
            tables = self._prompt_tables.get(prompt_index)
            choice.prompt_logprobs = (
                None
                if tables is None
                else LogprobForms.prompt(inputs.prompt_token_ids, tables, request.prompt_logprobs)
            )

    def _echoed_text(self, prompt_index: int) -> str:
        text = self._echoes.get(prompt_index)
        if text is None:
            inputs = self._inputs[prompt_index]
            text = inputs.prompt
            if text is None or inputs.num_truncated_prompt_tokens:
                skip_special_tokens = inputs.params.skip_special_tokens
                text = self._tokenizer.decode(inputs.prompt_token_ids, skip_special_tokens=skip_special_tokens)
            self._echoes[prompt_index] = text
        return text

    def _echoed_logprobs(self, prompt_index: int) -> CompletionLogprobs | None:
        tables = self._prompt_tables.get(prompt_index)
        if not self._request.echoes_logprobs or tables is None:
            return None
        inputs = self._inputs[prompt_index]
        offsets = TokenOffsets(self._tokenizer, inputs.params)
        return self._forms.completion(inputs.prompt_token_ids, tables, offsets)

    def _body(self, choices: list[CompletionChoice], usage: Usage | UnsetType) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_truncated_tokens=self.num_truncated or UNSET,
        )


def _tells(choice: CompletionChoice) -> bool:
    """Whether there is anything new in it."""
    has_logprobs = choice.logprobs is not None and choice.logprobs.tokens
    return bool(choice.text or choice.finish_reason or has_logprobs or choice.token_ids)


def _without_tokens(part: CompletionOutput) -> CompletionOutput:
    """A choice of which nothing was to be generated; the engine generates one token at least."""
    logprobs = None if part.logprobs is None else part.logprobs[:0]
    finish_reason = "length" if part.finish_reason in ("length", "stop") else part.finish_reason
    return replace(part, text="", token_ids=[], logprobs=logprobs, finish_reason=finish_reason, stop_reason=None)
