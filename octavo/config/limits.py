"""How much of the server one client may hold, and for how long."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["LimitsConfig"]

_LONGEST_SECONDS = 10**6  # more than the system's own timers take


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    max_body_bytes: int = option(
        "largest request body; a larger one is answered with 413", default=32 * 1024 * 1024, least=1, most=2**40
    )
    max_header_bytes: int = option(
        "largest head of a request, all its headers together; a larger one is answered with 431",
        default=64 * 1024,
        flag="h11-max-incomplete-event-size",
        least=1024,
        most=2**30,
    )
    max_header_count: int = option(
        "most headers of a request; more are answered with 431",
        default=128,
        flag="h11-max-header-count",
        least=16,
        most=2**20,
    )
    max_connections: int = option(
        "most open connections of a front end, if the process may open so many files; beyond them only the probes are "
        "answered, all else gets 503",
        default=16384,
        least=1,
        most=2**20,
    )
    request_header_timeout: float = option(
        "how long a client may take for a request's headers, from its first byte or the connection on",
        default=30.0,
        metavar="SECONDS",
        least=0.1,
        most=_LONGEST_SECONDS,
    )
    request_body_timeout: float = option(
        "how long it may take for the body; every 16 KiB that come give it a second more",
        default=30.0,
        metavar="SECONDS",
        least=0.1,
        most=_LONGEST_SECONDS,
    )
    write_timeout: float = option(
        "how long a client may accept nothing of its answer before it is given up, and its request aborted",
        default=60.0,
        metavar="SECONDS",
        least=0.1,
        most=_LONGEST_SECONDS,
    )
    keep_alive_timeout: float = option(
        "how long a connection is kept open between two requests",
        default=75.0,
        flag="timeout-keep-alive",
        metavar="SECONDS",
        least=0.1,
        most=_LONGEST_SECONDS,
    )
