"""OpenAI's HTTP API: requests, responses, and the serving objects that turn one into the other."""

from octavo.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, parse_request
from octavo.entrypoints.openai.serving_chat import OpenAIServingChat
from octavo.entrypoints.openai.serving_completion import OpenAIServingCompletion
from octavo.entrypoints.openai.serving_models import OpenAIServingModels

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "OpenAIServingChat",
    "OpenAIServingCompletion",
    "OpenAIServingModels",
    "parse_request",
]
