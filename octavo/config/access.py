"""Who may use the server."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["AccessConfig"]


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    api_key: list[str] | None = option(
        "keys, one of which every request must bring (Authorization: Bearer KEY, or x-api-key: KEY), for everything "
        "but GET /health, /live and /ready: for /metrics too. Others on the machine can see a command line: prefer "
        "--api-key-file, or the environment variable OCTAVO_API_KEY, which counts where neither flag is given",
        default=None,
        metavar="KEY",
        secret=True,
    )
    api_key_file: str | None = option(
        "YAML or JSON file with a list of keys: key (or sha256, its digest in hex) and name, and where wanted "
        "requests_per_minute, max_concurrent_requests (of POST requests; more are answered with 429) and priority "
        "(of its requests, with --scheduling-policy priority; lower goes first)",
        default=None,
        metavar="FILE",
    )
    allowed_origins: list[str] = option(
        "origins (https://host[:port]) whose pages in a browser may use the server: names, or a JSON list of them. "
        "None is allowed unless stated, because any page could else use a server on its visitor's own machine; '*' "
        "(vLLM's default) allows all",
        default=[],
        metavar="ORIGIN",
    )
    allowed_methods: list[str] | None = option(
        "HTTP methods that pages of --allowed-origins may use (default: all)", metavar="METHOD"
    )
    allowed_headers: list[str] | None = option(
        "headers that pages of --allowed-origins may send (default: all)", metavar="HEADER"
    )
    allow_credentials: bool = option("pages of --allowed-origins may send cookies and the like", default=False)
    root_path: str | None = option(
        "prefix of paths (/prefix) under which a proxy offers the server, whether the proxy strips it or not",
        default=None,
        metavar="PATH",
    )
    forwarded_allow_ips: list[str] = option(
        "addresses or networks (10.0.0.0/8) of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed, with "
        "commas or spaces between them: the log then shows their clients; '*' believes everybody, and is what a proxy "
        "on --uds needs",
        default=[],
        metavar="ADDRESS",
    )
    middleware: list[str] = option(
        "ASGI middleware around the whole server: module.Name of a class, or of a coroutine function (request, "
        "call_next); may be given several times: the first sees a request first",
        default=[],
        metavar="NAME",
    )
