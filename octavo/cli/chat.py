"""``octavo chat``: talks to a running server from a terminal."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from octavo.cli.terminal import add_client_flags, open_client, options_of, show_stream
from octavo.logging import one_line

if TYPE_CHECKING:
    from octavo.cli.api_client import ApiClient

__all__ = ["add_parser", "run"]

_PROMPT = "> "


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to a running server",
        description="Asks one question, or without MESSAGE talks on until /exit or Ctrl-D; Ctrl-C stops an answer.",
        allow_abbrev=False,
    )
    parser.add_argument("message", nargs="?", metavar="MESSAGE", help="one question, one answer")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        chat = _Chat(client, options_of(args, client), args.system)
        if args.message is not None:
            return 0 if chat.ask(args.message) else 130
        _talk(chat)
    return 0


class _Chat:
    """A conversation: what was said so far, and the next answer."""

    def __init__(self, client: "ApiClient", options: dict[str, Any], system: str | None) -> None:
        self._client = client
        self._options = options
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    @property
    def model(self) -> str:
        return str(self._options["model"])

    def ask(self, question: str) -> bool:
        """Shows the answer as it comes; False if Ctrl-C stopped it. As far as it came it enters the history, unless it
        failed."""
        asked = [*self._messages, {"role": "user", "content": question}]
        shown = show_stream(self._client.stream("chat/completions", self._options | {"messages": asked}))
        if shown.text:
            self._messages = [*asked, {"role": "assistant", "content": shown.text}]
        return not shown.stopped


def _talk(chat: _Chat) -> None:
    import readline  # noqa: F401 (gives input() line editing and a history)

    from octavo.cli.api_client import ApiError

    interactive = sys.stdin.isatty()
    if interactive:
        print(f"Talking to {chat.model}. Ctrl-C stops an answer; /exit or Ctrl-D leaves.")
    while True:
        try:
            question = input(_PROMPT if interactive else "").strip()
            if question == "/exit":
                return
            if question:
                chat.ask(question)
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:
            print()
        except ApiError as error:
            if not interactive:
                raise
            print(f"octavo: error: {one_line(str(error))}", file=sys.stderr)
