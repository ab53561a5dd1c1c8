"""``octavo``: finds the sub-command, runs it, and tells errors in one line with the exit code that belongs to them."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import octavo
from octavo import envs
from octavo.cli import chat, complete, pull, serve
from octavo.errors import EngineDeadError, OctavoError
from octavo.logging import one_line

__all__ = ["main"]

_COMMANDS = (serve, chat, complete, pull)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0; 1 configuration, model or port; 2 usage; 3 the engine died."""
    words = _dashed(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="octavo", description="An LLM inference and serving engine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"octavo {octavo.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        commands.choices.get(words[0], parser).refuse(unknown)
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    try:
        envs.log_level()  # a command that never logs should refuse it, too
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
    """Names the flag or command that was probably meant, and does not bury the error under a page of usage."""

    def refuse(self, unknown: list[str]) -> None:
        """Exits with code 2."""
        hints = [hint for word in unknown if word.startswith("-") and (hint := self._hint(word.partition("=")[0]))]
        self.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *hints]))

    def _hint(self, flag: str) -> str | None:
        for action in self._actions:
            if not action.option_strings and flag == f"--{action.dest}":
                return f"{action.metavar} is given without a flag: {self.prog} {action.metavar}"
        known = [name for action in self._actions for name in action.option_strings]
        close = difflib.get_close_matches(flag, known, n=1)
        return f"did you mean {close[0]}?" if close else None

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(message)}\nTry: {self.prog} --help\n")


def _dashed(words: Sequence[str]) -> list[str]:
    """``--max_model_len=8`` as ``--max-model-len=8``: both are in use."""
    done: list[str] = []
    for index, word in enumerate(words):
        if word == "--":
            return [*done, *words[index:]]
        flag, equals, value = word.partition("=")
        done.append(flag.replace("_", "-") + equals + value if word.startswith("--") else word)
    return done
