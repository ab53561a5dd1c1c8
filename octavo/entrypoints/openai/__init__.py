"""OpenAI's HTTP API: requests, responses, and the serving objects that turn one into the other."""

from octavo.entrypoints.openai.chat_request import ChatCompletionRequest
from octavo.entrypoints.openai.completion_request import CompletionRequest
from octavo.entrypoints.openai.generation import Answer
from octavo.entrypoints.openai.protocol import RequestBody
from octavo.entrypoints.openai.serving_chat import OpenAIServingChat
from octavo.entrypoints.openai.serving_completion import OpenAIServingCompletion
from octavo.entrypoints.openai.serving_models import OpenAIServingModels
from octavo.entrypoints.openai.serving_tokenization import OpenAIServingDetokenization, OpenAIServingTokenization
from octavo.entrypoints.openai.tokenize_request import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

__all__ = [
    "Answer",
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "OpenAIServingChat",
    "OpenAIServingCompletion",
    "OpenAIServingDetokenization",
    "OpenAIServingModels",
    "OpenAIServingTokenization",
    "RequestBody",
    "TokenizeChatRequest",
    "TokenizeCompletionRequest",
]
