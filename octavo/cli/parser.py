"""The argument parser of all commands: short errors that say what was probably meant, and help that can be searched."""

import argparse
import difflib
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from octavo.config import absent_flags
from octavo.logging import one_line

__all__ = ["Parser"]


# What other engines call it (llama.cpp, Ollama), where the names are too unlike to be guessed.
_ELSEWHERE = {
    "--ctx-size": "use --max-model-len",
    "--n-gpu-layers": "octavo has no GPU kernels yet",
    "--ngl": "octavo has no GPU kernels yet",
    "--threads": "octavo uses the cores that this process may use; set OMP_NUM_THREADS for fewer",
    "--parallel": "use --max-num-seqs",
}


class Parser(argparse.ArgumentParser):
    """Names the flag or command that was probably meant, and does not bury the error under a page of usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, add_help=False)
        self.add_argument(
            "-h",
            "--help",
            nargs="?",
            action=_Help,
            default=argparse.SUPPRESS,
            metavar="WORD",
            help="show this and leave; with WORD: a flag, a group of options (listgroup: their names), or all that "
            "speak of it",
        )

    def named(self, words: Sequence[str]) -> "Parser":
        """The parser of the command, or of the command's command, with whose name the words begin."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and words and words[0] in action.choices:
                found: Parser = action.choices[words[0]]
                return found.named(words[1:])
        return self

    def refuse(self, unknown: list[str]) -> NoReturn:
        """Exits with code 2."""
        hints = [hint for word in unknown if word.startswith("-") and (hint := self._hint(word.partition("=")[0]))]
        self.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *hints]))

    def closest(self, flag: str) -> str | None:
        """The flag that was probably meant."""
        known = [name for action in self.shown_actions() for name in action.option_strings]
        close = difflib.get_close_matches(flag, known, n=1)
        return close[0] if close else None

    def shown_actions(self) -> list[argparse.Action]:
        """Those that ``--help`` tells of."""
        return [action for action in self._actions if action.help != argparse.SUPPRESS]

    def _hint(self, flag: str) -> str | None:
        for action in self._actions:
            if not action.option_strings and flag == f"--{action.dest}":
                return f"{action.metavar} is given without a flag: {self.prog} {action.metavar}"
        if flag in _ELSEWHERE:
            return f"{flag}: {_ELSEWHERE[flag]}"
        close = self.closest(flag)
        return f"did you mean {close}?" if close else None

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(message)}\nTry: {self.prog} --help\n")


class _Help(argparse.Action):
    """``--help``: everything; ``--help=WORD``: what it is about."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        assert isinstance(parser, Parser)
        text = parser.format_help() if values in (None, "all") else _about(parser, values)
        if text is None:
            parser.error(f"nothing in the help speaks of {values!r}; --help=listgroup lists the groups of options")
        parser._print_message(text, sys.stdout)
        parser.exit()


def _about(parser: Parser, word: str) -> str | None:
    """The part of the help that ``word`` asks for; None where there is none."""
    wanted = word.lower().replace("_", "-").lstrip("-")
    groups = _groups(parser)
    if wanted == "listgroup":
        return "".join(f"{name}: {len(actions)} flags\n" for name, actions in groups.items())
    group = wanted.removesuffix("config")  # also as vLLM calls them: ModelConfig
    if group in groups:
        return _format(parser, {group: groups[group]})
    exact = [action for action in parser.shown_actions() if f"--{wanted}" in action.option_strings]
    if exact:
        return _format(parser, {"": exact})
    found = {
        name: [action for action in actions if wanted in _text(action).lower()] for name, actions in groups.items()
    }
    return (_format(parser, found) + _absent(parser, wanted)) or None


def _groups(parser: Parser) -> dict[str, list[argparse.Action]]:
    """Name → its flags."""
    found = {}
    for group in parser._action_groups:
        flags = [item for item in group._group_actions if item.option_strings and item.help != argparse.SUPPRESS]
        if flags:
            found[str(group.title).removesuffix(" options")] = flags
    return found


def _format(parser: Parser, groups: dict[str, list[argparse.Action]]) -> str:
    formatter = parser._get_formatter()
    for name, actions in groups.items():
        formatter.start_section(f"{name} options" if name else "options")
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def _text(action: argparse.Action) -> str:
    return " ".join([*action.option_strings, str(action.metavar or ""), action.help or ""])


def _absent(parser: Parser, wanted: str) -> str:
    """Flags that octavo does not have, where this command takes the engine's."""
    known = {name for action in parser._actions for name in action.option_strings}
    found: dict[str, list[str]] = {}
    for absent in absent_flags().values():
        if wanted in absent.flag and absent.flag in known:
            found.setdefault(absent.why, []).append(absent.flag)
    width = shutil.get_terminal_size().columns - 2
    text = "".join(
        textwrap.fill(f"  {', '.join(flags)}: {why}", width, subsequent_indent="      ", break_on_hyphens=False) + "\n"
        for why, flags in found.items()
    )
    return text and f"\nnot in octavo:\n{text}"
