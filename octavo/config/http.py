"""Where the server listens, and its processes."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["HttpConfig"]


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    host: str = option(
        "address to listen on; the default is reached from this machine only, 0.0.0.0 from all", default="127.0.0.1"
    )
    port: int = option("port to listen on; 0: any that is free", default=8000, least=0, most=65535)
    api_server_count: int = option(
        "front-end processes, which share the port and one engine", default=1, short="-asc", least=1, most=64
    )
    shutdown_timeout: float = option(
        "how long running requests may go on after SIGTERM or SIGINT; 0: end at once",
        default=30.0,
        metavar="SECONDS",
        least=0,
    )
