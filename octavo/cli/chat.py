"""``octavo chat``: talks to a running server from a terminal."""

import argparse
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

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
    from octavo.cli.terminal import add_client_flags

    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from octavo.cli.terminal import open_client, options_of

    with open_client(args) as client:
        chat = _Chat(client, options_of(args, client), args.system)
        if args.message is None:
            _talk(chat)
        elif not chat.ask(args.message):
            return 130
    return 0


class _Chat:
    """A conversation: what was said so far, and the next answer."""

    def __init__(self, client: "ApiClient", options: dict[str, Any], system: str | None) -> None:
        self._client = client
        self._options = options
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, question: str) -> bool:
        """Shows the answer as it comes; False if Ctrl-C stopped it. As far as it came it enters the history, unless it
        failed."""
        from octavo.cli.terminal import show

        asked = [*self._messages, {"role": "user", "content": question}]
        answer, finished = "", True
        with closing(self._client.stream("chat/completions", self._options | {"messages": asked})) as choices:
            try:
                for choice in choices:
                    text = choice["delta"].get("content") or ""
                    answer += text
                    show(text)
            except KeyboardInterrupt:
                finished = False
        show("\n" if finished else " [stopped]\n")
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        return finished


def _talk(chat: _Chat) -> None:
    import readline  # noqa: F401 (gives input() line editing and a history)

    from octavo.cli.api_client import ApiError

    while True:
        try:
            question = input(_PROMPT if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        if question.strip() == "/exit":
            return
        if not question.strip():
            continue
        try:
            chat.ask(question)
        except ApiError as error:
            print(f"octavo: error: {error}", file=sys.stderr)
