"""``octavo complete``: goes on with a text, from a terminal."""

import argparse
from typing import Any

from octavo.cli.terminal import add_client_flags, open_client, options_of, show_stream

__all__ = ["add_parser", "run"]

# The API's own default, 16, is of no use to a person.
_MAX_TOKENS = 256


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    parser = subparsers.add_parser(
        "complete", help="complete a text with a running server", description="Completes a text.", allow_abbrev=False
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to go on with")
    add_client_flags(parser, max_tokens=_MAX_TOKENS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        body = options_of(args, client) | {"prompt": args.prompt}
        shown = show_stream(client.stream("completions", body))
    return 130 if shown.stopped else 0
