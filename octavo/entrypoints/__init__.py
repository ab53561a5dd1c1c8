"""The HTTP doors: OpenAI's API over an AsyncLLM, and the life of the server process."""

from octavo.entrypoints.api_server import build_app
from octavo.entrypoints.launcher import ServeOptions, serve
from octavo.entrypoints.server_state import ServerState, Services

__all__ = ["ServeOptions", "ServerState", "Services", "build_app", "serve"]
