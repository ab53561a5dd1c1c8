"""What the commands that talk to a server share: their flags, and how generated text gets to a terminal."""

import argparse
import sys
from typing import Any

from octavo.cli.api_client import ApiClient

__all__ = ["add_client_flags", "open_client", "options_of", "show"]

# A terminal obeys these; text from a model must not steer it.
_CONTROL = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://localhost:8000/v1", help="the server's API (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server has")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    parser.add_argument("--temperature", type=float, metavar="X")
    parser.add_argument("--max-tokens", type=int, metavar="N")


def open_client(args: argparse.Namespace) -> ApiClient:
    return ApiClient(args.url, args.api_key)


def options_of(args: argparse.Namespace, client: ApiClient) -> dict[str, Any]:
    """Model and sampling options of a request."""
    options: dict[str, Any] = {"model": args.model or client.first_model()}
    for name in ("temperature", "max_tokens"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    return options


def show(text: str) -> None:
    """Writes a piece of generated text."""
    sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()
