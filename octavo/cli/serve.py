"""``octavo serve``: an OpenAI-compatible server."""

import argparse
import contextlib
import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from octavo import envs
from octavo.config import EngineArgs
from octavo.parsers import REASONING_PARSERS

if TYPE_CHECKING:
    from octavo.entrypoints import ServeOptions

__all__ = ["add_parser", "run"]


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="%(prog)s [MODEL] [flags]",
        description="Serves a model over HTTP, with OpenAI's API. Without MODEL it is the demo model, smollm2.",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="alias, local folder, .gguf file or hub name")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of flags, without their dashes (max-model-len: 4096); the command line goes before it",
    )
    server = parser.add_argument_group("server options")
    server.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, this machine only; 0.0.0.0: all interfaces)",
    )
    server.add_argument("--port", type=_port, default=8000, metavar="N", help="default: %(default)s; 0: any free port")
    server.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja template to use instead of the model's own"
    )
    server.add_argument(
        "--reasoning-parser",
        choices=("auto", "none", *REASONING_PARSERS),
        default="auto",
        help="what tells reasoning from the answer; auto: as the chat template shows; none: all is answer "
        "(default: %(default)s)",
    )
    server.add_argument(
        "--trust-request-chat-template",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="requests may bring a chat template of their own (default: no)",
    )
    server.add_argument(
        "--strict-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="refuse fields of requests that octavo does not know, instead of naming them in the header "
        "x-octavo-ignored (default: no)",
    )
    server.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM or SIGINT (default: 30; 0: end at once)",
    )
    server.add_argument(
        "--max-body-bytes",
        type=_positive,
        default=32 * 1024 * 1024,
        metavar="N",
        help="largest request body; a larger one is answered with 413 (default: %(default)s)",
    )
    server.add_argument("--disable-uvicorn-access-log", action="store_true", help="no log line for each request")
    server.add_argument(
        "--uvicorn-log-level",
        choices=("critical", "error", "warning", "info", "debug"),
        default="info",
        help="least severe lines of the HTTP server to log (default: %(default)s)",
    )
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    if args.model is None and _may_hold_model(args.served_model_name or []):
        args.usage_error(
            "--served-model-name takes every word after it, so MODEL must come first: "
            "octavo serve MODEL --served-model-name NAME ... (smollm2 is the demo model)"
        )
    signal.signal(signal.SIGTERM, _terminated)  # until the server has a handler of its own
    engine_args = EngineArgs.from_cli_args(args)
    from octavo.engine import early_engine

    own_process = envs.enable_multiprocessing(default=True)
    with early_engine() if own_process else contextlib.nullcontext():
        from octavo.entrypoints import serve

        return serve(engine_args, _options(args))


def _may_hold_model(names: list[str]) -> bool:
    """Whether the last of the names that the API answers to was probably meant as MODEL."""
    return len(names) > 1 or any(name.endswith(".gguf") or os.path.exists(name) for name in names)


def _options(args: argparse.Namespace) -> "ServeOptions":
    from octavo.entrypoints import ServeOptions

    return ServeOptions(
        host=args.host,
        port=args.port,
        chat_template=args.chat_template,
        reasoning_parser=args.reasoning_parser,
        trust_request_chat_template=args.trust_request_chat_template,
        strict_requests=args.strict_requests,
        shutdown_timeout=args.shutdown_timeout,
        access_log=not args.disable_uvicorn_access_log,
        log_level=args.uvicorn_log_level,
        max_body_bytes=args.max_body_bytes,
    )


def _terminated(signum: int, _: Any) -> NoReturn:
    sys.exit(128 + signum)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a whole number between 0 and 65535, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, got {text!r}")
    return value
