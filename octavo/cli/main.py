"""``octavo``: finds the sub-command, runs it, and tells errors in one line with the exit code that belongs to them."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

import octavo
from octavo.cli import chat, complete, pull, serve
from octavo.errors import EngineDeadError, OctavoError
from octavo.logging import one_line

__all__ = ["main"]

_COMMANDS = (serve, chat, complete, pull)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0; 1 configuration, model or port; 2 usage; 3 the engine died."""
    words = [_dashed(word) for word in (sys.argv[1:] if argv is None else argv)]
    parser = _Parser(prog="octavo", description="An LLM inference and serving engine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"octavo {octavo.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser.refuse(unknown, words)
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    try:
        code: int = args.run(args)
    except OctavoError as error:
        print(f"octavo: error: {one_line(str(error))}", file=sys.stderr, flush=True)
        return 3 if isinstance(error, EngineDeadError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; there must be no second complaint when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


class _Parser(argparse.ArgumentParser):
    """Names the flag that was probably meant."""

    def refuse(self, unknown: list[str], words: list[str]) -> None:
        """Exits with code 2."""
        command = next((parser for name, parser in self._commands().items() if name in words), self)
        known = [flag for action in command._actions for flag in action.option_strings]
        hints = []
        for word in unknown:
            close = difflib.get_close_matches(word.partition("=")[0], known, n=1) if word.startswith("-") else []
            hints += [f"did you mean {close[0]}?"] if close else []
        command.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *hints]))

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {name: parser for action in actions for name, parser in action.choices.items()}


def _dashed(word: str) -> str:
    """``--max_model_len=8`` as ``--max-model-len=8``: both are in use."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value
