"""What the front ends write about requests."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["LogsConfig"]


@dataclass(frozen=True, kw_only=True)
class LogsConfig:
    disable_uvicorn_access_log: bool = option("no log line for each request", default=False)
    uvicorn_log_level: str = option(
        "least severe lines of the HTTP server to log",
        default="info",
        choices=("critical", "error", "warning", "info", "debug"),
    )
