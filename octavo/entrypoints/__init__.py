"""The HTTP doors: OpenAI's API over an AsyncLLM, and the life of the server process."""

from octavo.entrypoints.api_server import build_app
from octavo.entrypoints.http_server import HttpServer
from octavo.entrypoints.launcher import serve
from octavo.entrypoints.server_state import ServerState, Services

__all__ = ["HttpServer", "ServerState", "Services", "build_app", "serve"]
