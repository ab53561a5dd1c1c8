"""``octavo pull``: fetches a model and says where it is. Progress goes to stderr, the path alone to stdout."""

import argparse
import sys
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    parser = subparsers.add_parser(
        "pull",
        help="fetch a model and print its path",
        description="Fetches a model, unless it is there already, and prints its path.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="alias (smollm2) or hub name (owner/name)")
    parser.add_argument(
        "--revision", metavar="TEXT", help="branch, tag or commit on the hub (default: its main branch)"
    )
    parser.add_argument(
        "--download-dir",
        metavar="FOLDER",
        help="folder to fetch into; give it to serve as well (default: the hub's own cache, OCTAVO_CACHE for aliases)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Imported here: it brings numpy, and no other command's --help should wait for that.
    from octavo.checkpoints import FetchOptions, pull

    progress = _Progress()
    try:
        path = pull(args.model, progress.show, FetchOptions(args.revision, args.download_dir))
    finally:
        progress.end()
    print(path)
    return 0


class _Progress:
    """A line that is written over on a terminal; elsewhere a line for each stage and tenth of it."""

    def __init__(self) -> None:
        self.last: tuple[str, int] | None = None
        self.width = 0

    def show(self, stage: str, share: float) -> None:
        terminal = sys.stderr.isatty()
        now = (stage, int(share * (100 if terminal else 10)))
        if now == self.last:
            return
        self.last = now
        text = f"{stage} {share:.0%}"
        # Blanks cover what a longer line before has left.
        sys.stderr.write(f"\r{text:<{self.width}}" if terminal else text + "\n")
        sys.stderr.flush()
        self.width = max(self.width, len(text))

    def end(self) -> None:
        if self.width and sys.stderr.isatty():
            sys.stderr.write("\n")
