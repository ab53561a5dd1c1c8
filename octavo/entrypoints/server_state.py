"""What the routes and the process around them know of each other: how far the engine is, and what is under way."""

import asyncio
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.active_requests import ActiveRequests
from octavo.entrypoints.errors import UnavailableError
from octavo.entrypoints.openai import OpenAIServingChat, OpenAIServingCompletion, OpenAIServingModels
from octavo.renderers import ChatRenderer, RenderedPrompt

if TYPE_CHECKING:
    from octavo.engine import AsyncLLM

__all__ = ["ServerState", "Services"]


class Services:
    """The routes' objects, once the engine is loaded.

    Args:
        engine: loaded.
        chat_template: instead of the model's own.
    """

    def __init__(self, engine: "AsyncLLM", chat_template: str | None = None) -> None:
        self.engine = engine
        self.models = OpenAIServingModels(engine.config)
        self.completion = OpenAIServingCompletion(engine, self.models)
        render = None if chat_template is None else _renderer(engine, chat_template)
        self.chat = OpenAIServingChat(engine, self.models, render)


def _renderer(engine: "AsyncLLM", chat_template: str) -> Any:
    renderer = ChatRenderer(engine.tokenizer, chat_template)

    async def render(messages: list[dict[str, Any]]) -> RenderedPrompt:
        return await asyncio.to_thread(renderer.render, messages)

    return render


class ServerState:
    """Args:

    max_body_bytes: largest request body.

    Attributes:
        stage: what is being loaded, until ``services`` are there.
        progress: share of this stage, 0 to 1.
        services: set when the engine is loaded.
        draining: no new request is let in.
        active: the generations under way.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.stage = "starting"
        self.progress = 0.0
        self.services: Services | None = None
        self.draining = False
        self.active = ActiveRequests()

    @property
    def dead_cause(self) -> str | None:
        """Why the engine is gone, once it is."""
        error = None if self.services is None else self.services.engine.dead_error
        return None if error is None else str(error)

    def serving(self) -> Services:
        """The services; UnavailableError if requests cannot be taken now."""
        if self.services is None:
            raise UnavailableError(f"the model is still loading ({self.stage}, {self.progress:.0%}); try again later")
        if self.dead_cause is not None:
            raise UnavailableError("the engine has died; the server is going down")
        if self.draining:
            raise UnavailableError("the server is shutting down and takes no new requests")
        return self.services
