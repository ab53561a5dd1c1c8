"""What a proxy says of its clients, where the operator believes it."""

import ipaddress
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from octavo.errors import ConfigError

__all__ = ["believe_proxies"]

_FLAG = "--forwarded-allow-ips"
_EVERYBODY = "*"


def believe_proxies(app: ASGIApp, stated: Sequence[str]) -> ASGIApp:
    """The app, for which a request's client is whom a proxy at one of these addresses has named last.

    Args:
        stated: addresses and networks, several of them with commas between them; ``*``: all. None: nobody is believed.

    Raises:
        ConfigError: one is neither.
    """
    proxies = [entry.strip() for each in stated for entry in each.split(",") if entry.strip()]
    if not proxies:
        return app
    for entry in proxies:
        if entry != _EVERYBODY and not _is_network(entry):
            raise ConfigError(
                f"{_FLAG} {entry!r:.100}: an address (10.0.0.7), a network (10.0.0.0/8) or '*' is expected"
            )
    believed: Any = ProxyHeadersMiddleware(
        _Checked(app),  # type: ignore[arg-type]
        _EVERYBODY if _EVERYBODY in proxies else proxies,
    )
    return believed  # type: ignore[no-any-return]


def _is_network(entry: str) -> bool:
    try:
        ipaddress.ip_network(entry)
    except ValueError:
        return False
    return True


class _Checked:
    """Only an address can be a client's: a proxy hands on whatever a client has written before."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if client is not None and ("/" in client[0] or not _is_network(client[0])):
            scope["client"] = ("unknown", 0)
        await self._app(scope, receive, send)
