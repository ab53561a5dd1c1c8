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
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp

from octavo.config import AccessConfig
from octavo.entrypoints.access.key_gate import KeyGate
from octavo.entrypoints.access.key_reload import KeyReload
from octavo.entrypoints.access.ledger import Ledger
from octavo.entrypoints.errors import on_error
from octavo.errors import ConfigError

__all__ = ["with_access"]

_ALL = "*"
# Beside those that every page may read.
_READABLE_HEADERS = (
    "x-request-id",
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-octavo-ignored",
    "x-octavo-truncated",
)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/A-Z]+")
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
        for name in reversed(config.middleware):
            app = _wrapped(app, name)
        app = ServerErrorMiddleware(app, on_error)

    async def refresh(scheduling_policy: str) -> None:
        if gate is not None and config.api_key_file is not None:
            await reload.run(gate, scheduling_policy)

    return _with_cors(app, config), refresh


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


def _with_cors(app: ASGIApp, config: AccessConfig) -> ASGIApp:
    origins = config.allowed_origins
    if not origins:
        stated = {
            "--allowed-methods": config.allowed_methods,
            "--allowed-headers": config.allowed_headers,
            "--allow-credentials": config.allow_credentials,
        }
        for flag, value in stated.items():
            if value:
                raise ConfigError(f"{flag} has no effect without --allowed-origins; state both, or neither")
        return app
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allowed-origins {origin!r:.200}: an origin as browsers send it is expected, like https://host:port "
                "without a slash at its end, or '*'"
            )
    if config.allow_credentials and _ALL in origins:
        raise ConfigError("--allow-credentials needs origins by name in --allowed-origins, not '*'")
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=config.allowed_methods or [_ALL],
        allow_headers=config.allowed_headers or [_ALL],
        allow_credentials=config.allow_credentials,
        expose_headers=_READABLE_HEADERS,
    )
