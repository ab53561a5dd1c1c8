"""POST /tokenize and POST /detokenize: what a text or a chat is to the model, and back. Nothing reaches the engine."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.entrypoints.openai.chat_request import plain_messages, render_options, unread_fields
from octavo.entrypoints.openai.generation import Answer
from octavo.entrypoints.openai.protocol import parse_request
from octavo.entrypoints.openai.responses import Detokenized, Tokenized
from octavo.entrypoints.openai.serving_models import OpenAIServingModels
from octavo.entrypoints.openai.tokenize_request import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    parse_tokenize_request,
)
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.engine import AsyncLLM
    from octavo.renderers import RenderedPrompt

__all__ = ["OpenAIServingDetokenization", "OpenAIServingTokenization"]

# Longer than any context, so that a text that does not fit can be counted; as long as a chat may be.
_MOST_CHARS = _MOST_IDS = 1 << 22
_SLICE = 1 << 16


class OpenAIServingTokenization:
    """Args: as OpenAIServingChat's."""

    id_prefix = "tok-"

    def __init__(
        self,
        engine: "AsyncLLM",
        models: OpenAIServingModels,
        render: "Callable[..., Awaitable[RenderedPrompt]]",
        trust_template: bool = False,
    ) -> None:
        self._engine = engine
        self._models = models
        self._render = render
        self._trust_template = trust_template

    def parse(self, body: dict[str, Any]) -> TokenizeCompletionRequest | TokenizeChatRequest:
        """Raises RequestError if the body is not of this API."""
        return parse_tokenize_request(body)

    async def create(
        self, request: TokenizeCompletionRequest | TokenizeChatRequest, request_id: str, arrival_time: float
    ) -> Answer:
        """The token ids, and how many they are; they may be more than the model's length."""
        self._models.served_name(request.model)
        unread: tuple[str, ...] = ()
        if isinstance(request, TokenizeChatRequest):
            rendered = await self._render(plain_messages(request), **render_options(request, self._trust_template))
            token_ids, unread = rendered.token_ids, unread_fields(request, rendered)
        else:
            if len(request.prompt) > _MOST_CHARS:
                message = f"prompt must have at most {_MOST_CHARS} characters, got {len(request.prompt)}"
                raise RequestError(message, param="prompt")
            special = request.add_special_tokens is not False
            token_ids = await asyncio.to_thread(self._engine.tokenizer.encode, request.prompt, special)
        tokens = None
        if request.return_token_strs:
            tokens = await asyncio.to_thread(self._token_strings, token_ids)
        tokenized = Tokenized(len(token_ids), self._engine.config.model.max_model_len, token_ids, tokens)
        return Answer(tokenized, unread=unread)

    async def info(self) -> dict[str, Any]:
        """The model's tokenizer_config.json, where it has one; with what is in use: class, named tokens, template."""
        tokenizer = self._engine.tokenizer
        file = Path(self._engine.config.model.tokenizer_path) / "tokenizer_config.json"
        found = await asyncio.to_thread(_read_settings, file) if file.is_file() else {}
        template = {} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}
        return {"tokenizer_class": "PreTrainedTokenizerFast"} | found | tokenizer.named_tokens | template

    def _token_strings(self, token_ids: list[int]) -> list[str]:
        """Each token's is made once, however often it comes: there may be millions."""
        shown = {token_id: self._engine.tokenizer.token_string(token_id) for token_id in set(token_ids)}
        return list(map(shown.__getitem__, token_ids))


def _read_settings(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    return found


class OpenAIServingDetokenization:
    """Args: as OpenAIServingChat's."""

    id_prefix = "detok-"

    def __init__(self, engine: "AsyncLLM", models: OpenAIServingModels) -> None:
        self._engine = engine
        self._models = models

    def parse(self, body: dict[str, Any]) -> DetokenizeRequest:
        """Raises RequestError if the body is not of this API."""
        return parse_request(DetokenizeRequest, body)

    async def create(self, request: DetokenizeRequest, request_id: str, arrival_time: float) -> Answer:
        """The text of the ids, special tokens included."""
        self._models.served_name(request.model)
        token_ids = request.tokens
        if not token_ids:
            raise RequestError("tokens must not be empty", param="tokens")
        if len(token_ids) > _MOST_IDS:
            raise RequestError(f"tokens must be at most {_MOST_IDS} ids, got {len(token_ids)}", param="tokens")
        return Answer(Detokenized(await asyncio.to_thread(self._text_of, token_ids)))

    def _text_of(self, token_ids: list[int]) -> str:
        """In a thread: there may be millions, which are looked at in pieces so that others get their turn."""
        vocab_size = self._engine.config.model.vocab_size
        for begin in range(0, len(token_ids), _SLICE):
            ids = token_ids[begin : begin + _SLICE]
            low, high = min(ids), max(ids)
            if low < 0 or high >= vocab_size:
                message = f"tokens must be ids of the vocabulary, 0 to {vocab_size - 1}; got {low if low < 0 else high}"
                raise RequestError(message, param="tokens")
        return self._engine.tokenizer.decode(token_ids, skip_special_tokens=False)
