"""``octavo serve``: an OpenAI-compatible server."""

import argparse
import contextlib
import os
from typing import Any

from octavo import envs
from octavo.config import EngineArgs, ServerConfig
from octavo.logging import set_log_format
from octavo.parsers import REASONING_PARSERS

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
    ServerConfig.add_cli_args(parser, {"reasoning_parser": ("auto", "none", *REASONING_PARSERS)})
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(run=run, holds_signals=True, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    if args.model is None:
        _check_no_list_holds_it(args)
    engine_args, server_config = EngineArgs.from_cli_args(args), ServerConfig.from_cli_args(args)
    if server_config.logs.log_format is not None:
        set_log_format(server_config.logs.log_format)
    from octavo.engine import early_engine

    own_process = envs.enable_multiprocessing(default=True)
    with early_engine() if own_process else contextlib.nullcontext() as socket_dir:
        from octavo.entrypoints import serve

        return serve(engine_args, server_config, socket_dir)


def _check_no_list_holds_it(args: argparse.Namespace) -> None:
    """Ends with a usage error where MODEL was probably taken for one of a flag's words: as a key, it would even open
    the server."""
    for keyword, words in vars(args).items():
        if isinstance(words, list) and _may_hold_model(words):
            flag = "--" + keyword.replace("_", "-")
            args.usage_error(
                f"{flag} takes every word after it, so MODEL must come first: "
                f"octavo serve MODEL {flag} NAME ... (smollm2 is the demo model)"
            )


def _may_hold_model(names: list[str]) -> bool:
    """Whether the last of them was probably meant as MODEL."""
    return len(names) > 1 or any(name.endswith(".gguf") or os.path.exists(name) for name in names)
