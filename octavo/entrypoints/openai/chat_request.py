"""Body of POST /v1/chat/completions, and what in it makes the prompt: the same fields are in a chat to be tokenized."""

from typing import Any, Protocol

from octavo.entrypoints.openai.protocol import GenerationRequest, Objects
from octavo.entrypoints.openai.unsupported import CHAT_ONLY, COMMON, refuse_unsupported
from octavo.errors import RequestError
from octavo.renderers import RenderedPrompt
from octavo.types import SamplingParams

__all__ = ["ChatCompletionRequest", "ChatFields", "message_text", "plain_messages", "render_options", "unread_fields"]

# Variables of a template that are not the client's to set, or have fields of their own.
_RESERVED_VARIABLES = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "documents",
    "tokenize",
)


class ChatFields(Protocol):
    """The fields that make a prompt of a conversation."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None


class ChatCompletionRequest(GenerationRequest):
    """What messages may look like is the chat template's matter."""

    messages: Objects
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def _unknown_fields(self) -> list[str]:
        return refuse_unsupported(self.model_extra or {}, COMMON | CHAT_ONLY)

    @property
    def stated_max_tokens(self) -> int | None:
        """The newer of two names goes first."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def default_max_tokens(self, defaults: dict[str, Any]) -> int | None:
        """What it may have at most without a stated number; None: all that the model's length leaves."""
        stated: int | None = defaults.get("max_tokens")
        return stated

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Without a stated number of tokens it has none: how much of the default fits is known with the prompt.

        Args:
            defaults: the model's, of what is not stated.

        Raises:
            RequestError: a value is out of range.
        """
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        stated = self.stated_max_tokens
        max_tokens = self.default_max_tokens(defaults) if stated is None else stated
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params = self._sampling_params(defaults, max_tokens=max_tokens, logprobs=logprobs)
        params.max_tokens = stated
        return params

    def echoed_text(self) -> str:
        """What stands before the answer: with ``echo``, the assistant's message that it goes on with."""
        last = self.messages[-1]
        return message_text(last) if self.echo and last.get("role") == "assistant" else ""

    def field_of(self, param: str | None) -> str | None:
        if param == "logprobs":
            return "top_logprobs"
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super().field_of(param)


def message_text(message: dict[str, Any]) -> str:
    """The text of a message that has been rendered, as templates get it."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def plain_messages(request: ChatFields) -> list[dict[str, Any]]:
    """The messages in the form that templates are written for: earlier reasoning under its older name."""
    return [
        {**message, "reasoning_content": message["reasoning"]}
        if "reasoning" in message and "reasoning_content" not in message
        else message
        for message in request.messages
    ]


def render_options(request: ChatFields, trust_template: bool) -> dict[str, Any]:
    """The keyword arguments of ``ChatRenderer.render`` that a request asks for.

    Args:
        trust_template: requests may bring a template of their own.

    Raises:
        RequestError: fields contradict each other, or are not the client's to set.
    """
    variables = dict(request.chat_template_kwargs or {})
    for name in _RESERVED_VARIABLES:
        if name in variables:
            raise RequestError(f"chat_template_kwargs must not set {name}", param="chat_template_kwargs")
    if request.documents is not None:
        variables["documents"] = request.documents
    if request.add_generation_prompt and request.continue_final_message:
        message = "continue_final_message needs add_generation_prompt: false, or none: the answer begins no new message"
        raise RequestError(message, param="continue_final_message")
    return {
        "add_generation_prompt": request.add_generation_prompt is not False and not request.continue_final_message,
        "continue_final_message": bool(request.continue_final_message),
        "chat_template": _own_template(request, variables, trust_template),
        "template_kwargs": variables,
    }


def unread_fields(request: ChatFields, rendered: RenderedPrompt) -> tuple[str, ...]:
    """Fields of a request that the chat template never reads."""
    variables = [name if name == "documents" else f"chat_template_kwargs.{name}" for name in rendered.unread]
    # plain_messages() gives earlier reasoning under two names: one that is read is enough.
    reads_reasoning = not {"reasoning", "reasoning_content"} <= {name for _, name in rendered.unread_fields}
    return *variables, *(
        f"messages[{index}].{name}"
        for index, name in rendered.unread_fields
        if name in request.messages[index] and not (name == "reasoning" and reads_reasoning)
    )


def _own_template(request: ChatFields, variables: dict[str, Any], trust_template: bool) -> str | None:
    """The template that the request brings, in either of two places; taken out of ``variables``."""
    among_variables = variables.pop("chat_template", None)
    name = "chat_template_kwargs" if among_variables is not None else "chat_template"
    template = among_variables if request.chat_template is None else request.chat_template
    if template is None:
        return None
    if not trust_template:
        message = (
            "chat_template is not taken from requests by this server; its operator may allow it with "
            "--trust-request-chat-template, or set one with --chat-template"
        )
        raise RequestError(message, param=name)
    if request.chat_template is not None and among_variables is not None:
        raise RequestError("chat_template is given twice, once in chat_template_kwargs", param=name)
    if not isinstance(template, str):
        raise RequestError("chat_template must be a string", param=name)
    return template
