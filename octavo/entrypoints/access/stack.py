"""The layers around the app, outermost first: CORS, the operator's middleware, API keys.

CORS is outermost so that a page can read every answer, 401 and 429 too, and because browsers ask what they may do
without a key. The operator's middleware is before the keys: it sees every request, and may bring the key itself.
"""

import inspect
import re
from collections.abc import Callable, Coroutine
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp

from octavo.config import AccessConfig
from octavo.entrypoints.access.cors import with_cors
from octavo.entrypoints.access.key_gate import KeyGate
from octavo.entrypoints.access.key_reload import KeyReload
from octavo.entrypoints.access.ledger import Ledger
from octavo.entrypoints.errors import on_error
from octavo.entrypoints.stream_parts import StreamParts
from octavo.errors import ConfigError

__all__ = ["with_access"]

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~@:+-]+)+")


def with_access(
    app: ASGIApp, config: AccessConfig, shared_dir: Path | None = None
) -> tuple[ASGIApp, Callable[[str], Coroutine[Any, Any, None]]]:
    """The app behind all that ``config`` states; and what, given the scheduling policy, takes changed files while the
    server runs.

    Args:
        shared_dir: where front ends of one server share what they count; None: there is only one.

    Raises:
        ConfigError: a setting, the file of keys or the operator's middleware is wrong.
    """
    if config.root_path is not None and not _ROOT_PATH.fullmatch(config.root_path):
        raise ConfigError(
            f"--root-path must be like /prefix, without a slash at its end, got {config.root_path!r:.200}"
        )
    reload = KeyReload(config)
    gate = None
    if reload.keys:
        app = gate = KeyGate(app, reload.keys, Ledger(reload.keys, shared_dir))
    if config.middleware:
        app = StreamParts(app)
        for name in reversed(config.middleware):
            app = _wrapped(app, name)
        app = ServerErrorMiddleware(app, on_error)

    async def refresh(scheduling_policy: str) -> None:
        if gate is not None and config.api_key_file is not None:
            await reload.run(gate, scheduling_policy)

    return with_cors(app, config), refresh


def _wrapped(app: ASGIApp, name: str) -> ASGIApp:
    middleware = _imported(name)
    if inspect.iscoroutinefunction(middleware):
        return BaseHTTPMiddleware(app, middleware)
    if not inspect.isclass(middleware):
        raise ConfigError(f"--middleware {name} is neither a class nor a coroutine function")
    make = cast(Callable[[ASGIApp], ASGIApp], middleware)
    try:
        return make(app)
    except Exception as error:
        raise ConfigError(f"--middleware {name} cannot be made: {type(error).__name__}: {error}") from error


def _imported(name: str) -> Any:
    module, _, attribute = name.replace(":", ".").rpartition(".")
    if not module:
        raise ConfigError(f"--middleware {name}: module.Name is expected")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        raise ConfigError(f"--middleware {name} cannot be imported: {type(error).__name__}: {error}") from error
