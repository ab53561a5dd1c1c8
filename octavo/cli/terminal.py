"""What the commands that talk to a server share: their flags, and how generated text gets to a terminal."""

import argparse
import sys
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from octavo.cli.api_client import ApiClient, Piece

__all__ = ["Shown", "add_client_flags", "open_client", "options_of", "show_stream"]

# A terminal obeys these; text from a model must not steer it.
_CONTROL = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Shown(NamedTuple):
    """What has been shown of an answer; ``stopped``: by Ctrl-C, before its end."""

    text: str
    stopped: bool


def add_client_flags(parser: argparse.ArgumentParser, max_tokens: int | None = None) -> None:
    """``max_tokens``: the default; None leaves it to the server."""
    parser.add_argument("--url", default="http://localhost:8000/v1", help="the server's API (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server has")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="0: always the likeliest token (default: what the server does)"
    )
    longest = "as long as the model takes" if max_tokens is None else max_tokens
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"longest answer (default: {longest})"
    )


def open_client(args: argparse.Namespace) -> "ApiClient":
    from octavo.cli.api_client import ApiClient  # here: `octavo --help` need not wait for an HTTP library

    return ApiClient(args.url, args.api_key)


def options_of(args: argparse.Namespace, client: "ApiClient") -> dict[str, Any]:
    """Model and sampling options of a request."""
    options: dict[str, Any] = {"model": args.model or client.first_model()}
    for name in ("temperature", "max_tokens"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    return options


def show_stream(pieces: "Generator[Piece, None, None]") -> Shown:
    """Writes an answer as it comes, until its end or Ctrl-C. The answer goes to stdout; what the model thinks before
    it, and why the answer is not whole, to stderr."""
    text, finish_reason, thinking, stopped = "", None, False, False
    with closing(pieces):
        try:
            for piece in pieces:
                if piece.reasoning:
                    thinking = True
                    _remark(piece.reasoning)
                if piece.text:
                    if thinking:
                        thinking = False
                        _remark("\n\n")
                    text += piece.text
                    _write(sys.stdout, piece.text)
                finish_reason = piece.finish_reason or finish_reason
        except KeyboardInterrupt:
            stopped = True
        finally:
            # Also before an error's message, which begins a line.
            _write(sys.stdout, "" if text.endswith("\n") or not (text or stopped) else "\n")
    if stopped:
        _remark("[stopped]\n")
    elif finish_reason == "length":
        _remark("[cut off at the limit of tokens; see --max-tokens]\n")
    return Shown(text, stopped)


def _remark(text: str) -> None:
    if sys.stderr.isatty():
        _write(sys.stderr, text, _DIM, _PLAIN)
    else:
        _write(sys.stderr, text)


def _write(stream: Any, text: str, before: str = "", after: str = "") -> None:
    """``text`` must not steer a terminal; what stands around it may."""
    stream.write(before + (text.translate(_CONTROL) if stream.isatty() else text) + after)
    stream.flush()
