"""POST /v1/completions: one or many prompts, as text or token ids, to choices."""

from typing import TYPE_CHECKING, Any

from octavo.entrypoints.openai.completion_answer import CompletionAnswer
from octavo.entrypoints.openai.completion_prompts import completion_prompts
from octavo.entrypoints.openai.completion_request import CompletionRequest
from octavo.entrypoints.openai.generation import Answer, process_prompts
from octavo.entrypoints.openai.protocol import parse_request
from octavo.entrypoints.openai.serving_models import OpenAIServingModels
from octavo.entrypoints.request_logger import RequestLogger
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.engine import AsyncLLM, EngineInputs

__all__ = ["OpenAIServingCompletion"]

# Entries of all prompts' logprobs in one answer. The engine has the same bound for each prompt.
_MOST_PROMPT_LOGPROBS = 1 << 22


class OpenAIServingCompletion:
    """Args:

    engine: a loaded engine.
    models: which names it is served under.
    request_logger: told of what will be started; None: nobody is.
    """

    id_prefix = "cmpl-"

    def __init__(
        self, engine: "AsyncLLM", models: OpenAIServingModels, request_logger: RequestLogger | None = None
    ) -> None:
        self._engine = engine
        self._models = models
        self._request_logger = request_logger

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Raises RequestError if the body is not of this API."""
        return parse_request(CompletionRequest, body)

    async def create(self, request: CompletionRequest, request_id: str, arrival_time: float) -> Answer:
        """The completion; or with ``stream`` its events, when all has been checked and nothing started yet."""
        model = self._models.served_name(request.model)
        defaults = self._engine.config.model.default_sampling_params
        try:
            params = request.sampling_params(defaults)
            prompts = await completion_prompts(request, self._engine.tokenizer)
            inputs = await process_prompts(
                self._engine,
                prompts,
                params,
                request,
                request_id,
                arrival_time,
                default_max_tokens=request.default_max_tokens(defaults),
                add_special_tokens=request.add_special_tokens is not False,
            )
            _check_prompt_tables(inputs, self._engine.config.model.vocab_size)
        except RequestError as error:
            raise request.in_own_words(error) from None
        if self._request_logger is not None:
            for item in inputs:
                self._request_logger.log_inputs(item)
        answer = CompletionAnswer(request, request_id, model, inputs, self._engine.tokenizer)
        outputs = self._engine.generate_from(*inputs)
        if self._request_logger is not None:
            outputs = self._request_logger.follow(outputs)
        content = answer.stream(outputs) if request.stream else await answer.collect(outputs)
        return Answer(content, answer.num_truncated, token_count=answer.token_count, has_tables=answer.has_tables)


def _check_prompt_tables(inputs: "list[EngineInputs]", vocab_size: int) -> None:
    """Refuses logprobs of many prompts that together are more than an answer can hold; each choice has its prompt's."""
    num_top = inputs[0].params.prompt_logprobs
    if num_top is None:
        return
    width = 1 + (vocab_size if num_top == -1 else min(num_top, vocab_size))
    num_entries = sum(len(item.prompt_token_ids) for item in inputs) * inputs[0].params.n * width
    if num_entries > _MOST_PROMPT_LOGPROBS:
        message = (
            f"the prompts' logprobs would be {num_entries} entries in all choices, but at most {_MOST_PROMPT_LOGPROBS} "
            "are given; send fewer prompts at once, or ask for fewer logprobs"
        )
        raise RequestError(message, param="prompt_logprobs")
