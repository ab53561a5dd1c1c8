"""``octavo complete``: goes on with a text, from a terminal."""

import argparse
from contextlib import closing
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    parser = subparsers.add_parser(
        "complete", help="complete a text with a running server", description="Completes a text.", allow_abbrev=False
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to go on with")
    from octavo.cli.terminal import add_client_flags

    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from octavo.cli.terminal import open_client, options_of, show

    with open_client(args) as client:
        body = options_of(args, client) | {"prompt": args.prompt}
        with closing(client.stream("completions", body)) as choices:
            for choice in choices:
                show(choice["text"])
    show("\n")
    return 0
