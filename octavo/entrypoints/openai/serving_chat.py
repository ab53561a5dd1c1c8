"""POST /v1/chat/completions: messages, rendered with the model's chat template, to an assistant's message."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.openai.chat_answer import ChatAnswer
from octavo.entrypoints.openai.chat_request import (
    ChatCompletionRequest,
    message_text,
    plain_messages,
    render_options,
    unread_fields,
)
from octavo.entrypoints.openai.generation import Answer, process_prompts
from octavo.entrypoints.openai.protocol import parse_request
from octavo.entrypoints.openai.reasoning_split import ReasoningSplit
from octavo.entrypoints.openai.serving_models import OpenAIServingModels
from octavo.entrypoints.request_logger import RequestLogger
from octavo.errors import RequestError
from octavo.parsers import ReasoningFormat

if TYPE_CHECKING:
    from octavo.engine import AsyncLLM
    from octavo.renderers import RenderedPrompt

__all__ = ["OpenAIServingChat"]


class OpenAIServingChat:
    """Args:

    engine: a loaded engine.
    models: which names it is served under.
    render: ``ChatRenderer.render`` off the event loop.
    reasoning_format: how answers are split into reasoning and content; None: they are not.
    trust_template: requests may bring a chat template of their own.
    request_logger: told of what will be started; None: nobody is.
    """

    id_prefix = "chatcmpl-"

    def __init__(
        self,
        engine: "AsyncLLM",
        models: OpenAIServingModels,
        render: "Callable[..., Awaitable[RenderedPrompt]]",
        reasoning_format: ReasoningFormat | None = None,
        trust_template: bool = False,
        request_logger: RequestLogger | None = None,
    ) -> None:
        self._engine = engine
        self._models = models
        self._render = render
        self._reasoning_format = reasoning_format
        self._trust_template = trust_template
        self._request_logger = request_logger

    def parse(self, body: dict[str, Any]) -> ChatCompletionRequest:
        """Raises RequestError if the body is not of this API."""
        return parse_request(ChatCompletionRequest, body)

    async def create(self, request: ChatCompletionRequest, request_id: str, arrival_time: float) -> Answer:
        """The answer; or with ``stream`` its events, when all has been checked and nothing started yet."""
        model = self._models.served_name(request.model)
        defaults = self._engine.config.model.default_sampling_params
        try:
            params = request.sampling_params(defaults)
            rendered = await self._render(plain_messages(request), **render_options(request, self._trust_template))
            prompt = {"prompt": rendered.text, "prompt_token_ids": rendered.token_ids}
            (inputs,) = await process_prompts(
                self._engine,
                [prompt],
                params,
                request,
                request_id,
                arrival_time,
                default_max_tokens=request.default_max_tokens(defaults),
            )
        except RequestError as error:
            raise request.in_own_words(error) from None
        if self._request_logger is not None:
            self._request_logger.log_inputs(inputs)
        continued = message_text(request.messages[-1]) if request.continue_final_message else None
        split = ReasoningSplit(self._reasoning_format, rendered.text, continued)
        answer = ChatAnswer(request, request_id, model, inputs, self._engine.tokenizer, split)
        outputs = self._engine.generate_from(inputs)
        if self._request_logger is not None:
            outputs = self._request_logger.follow(outputs)
        content = answer.stream(outputs) if request.stream else await answer.collect(outputs)
        unread = unread_fields(request, rendered)
        return Answer(content, inputs.num_truncated_prompt_tokens, unread, answer.token_count, answer.has_tables)
