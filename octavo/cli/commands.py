"""``octavo``: finds the sub-command, runs it, and tells errors in one line with the exit code that belongs to them."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import octavo
from octavo import envs
from octavo.cli import bench, chat, collect_env, complete, pull, run_batch, serve
from octavo.cli.config_file import take_config_file
from octavo.cli.parser import Parser
from octavo.cli.words import dashed, join_dotted
from octavo.errors import EngineDeadError, OctavoError, UsageError
from octavo.logging import say

__all__ = ["read", "run"]

_COMMANDS = {
    "serve": serve,
    "chat": chat,
    "complete": complete,
    "pull": pull,
    "run-batch": run_batch,
    "bench": bench,
    "collect-env": collect_env,
}


def read(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, for ``run``.

    ``holds_signals``: the command begins with SIGTERM and SIGINT held, and lets them through when it has handlers.

    Raises:
        SystemExit: it is wrong (2), or only asks for help or the version (0).
    """

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser = Parser(prog="octavo", description="An LLM inference and serving engine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"octavo {octavo.__version__}")
    parser.set_defaults(run=show_help, holds_signals=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    words = dashed(sys.argv[1:] if argv is None else argv)
    asked = _COMMANDS.get(words[0]) if words else None
    for command in _COMMANDS.values() if asked is None else (asked,):  # all their flags take long to declare
        command.add_parser(commands)
    chosen = parser.named(words)
    words = join_dotted(words, chosen.error)
    take_config_file(chosen, words)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        chosen.refuse(unknown)
    return args


def run(args: argparse.Namespace) -> int:
    """Returns the exit code, see octavo.cli.main."""
    try:
        envs.log_level(), envs.log_format()  # a command that never logs should refuse them, too
        code: int = args.run(args)
    except OctavoError as error:
        say(f"octavo: error: {error}", logging.ERROR)
        return 3 if isinstance(error, EngineDeadError) else 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        # Whoever read our output has gone; there must be no second complaint when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
