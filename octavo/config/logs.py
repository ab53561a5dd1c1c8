"""What the front ends write about requests, and how the whole server writes."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["LogsConfig"]


@dataclass(frozen=True, kw_only=True)
class LogsConfig:
    log_format: str | None = option(
        "all lines of the server, as text or as an object of JSON each; text, if OCTAVO_LOG_FORMAT says nothing else",
        choices=("text", "json"),
    )
    disable_uvicorn_access_log: bool = option("no log line for each request", default=False)
    disable_access_log_for_endpoints: str | None = option(
        "paths of which requests are not logged, with commas between them: /health,/live,/ready", metavar="PATHS"
    )
    enable_log_requests: bool = option("log the prompt and the parameters of each request, too", default=False)
    enable_log_outputs: bool = option(
        "log the text of each answer when it has ended, too; needs --enable-log-requests", default=False
    )
    max_log_len: int = option(
        "characters and token ids of a prompt, and characters of an answer, that are logged at most",
        default=2048,
        least=0,
        most=2**31 - 1,
    )
    uvicorn_log_level: str = option(
        "least severe lines of the HTTP server to log",
        default="info",
        choices=("critical", "error", "warning", "info", "debug"),
    )
