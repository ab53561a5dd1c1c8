"""Which pages in browsers may read answers: those of the app, and refusals that are made before it."""

import re
from collections.abc import Callable, Iterable

from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.config import AccessConfig
from octavo.errors import ConfigError

__all__ = ["RawHeaders", "refusal_headers", "with_cors"]

RawHeaders = Iterable[tuple[bytes, bytes]]

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


def with_cors(app: ASGIApp, config: AccessConfig) -> ASGIApp:
    """The app, whose answers the pages of ``--allowed-origins`` may read.

    Raises:
        ConfigError
    """
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
    return _middleware(app, config)


def refusal_headers(config: AccessConfig) -> Callable[[RawHeaders], list[tuple[bytes, bytes]]]:
    """What gives the headers of an answer that is made before any app, from those of the request that have come so far:
    where the Origin is not among them, the only page that may read it is taken to be the one that asks."""
    origins = config.allowed_origins
    if not origins:
        return lambda headers: []
    cors = _middleware(_no_app, config)

    def headers_for(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
        found = next((value.decode("latin-1") for name, value in headers if name == b"origin"), None)
        origin = found or (origins[0] if len(origins) == 1 else "")
        answer = MutableHeaders(cors.simple_headers)
        if not cors.allow_all_origins and cors.is_allowed_origin(origin):
            cors.allow_explicit_origin(answer, origin)
        return answer.raw

    return headers_for


async def _no_app(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotImplementedError


def _middleware(app: ASGIApp, config: AccessConfig) -> CORSMiddleware:
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods or [_ALL],
        allow_headers=config.allowed_headers or [_ALL],
        allow_credentials=config.allow_credentials,
        expose_headers=_READABLE_HEADERS,
    )
