"""Messages → prompt: chat templates in a bounded sandbox. Knows nothing of requests, sockets or models."""

from octavo.renderers.chat_renderer import ChatRenderer, RenderedPrompt

__all__ = ["ChatRenderer", "RenderedPrompt"]
