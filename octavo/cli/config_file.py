"""``--config FILE``: flags from a YAML file. What the command line says goes before it."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import load_yaml
from octavo.errors import ConfigError
from octavo.logging import one_line

if TYPE_CHECKING:
    from octavo.cli.parser import Parser

__all__ = ["take_config_file"]

_FLAG = "--config"
_MAX_BYTES = 1 << 20


def take_config_file(parser: "Parser", words: Sequence[str]) -> None:
    """Makes what the file that ``words`` name says the defaults of ``parser``. Ends with a usage error (exit code 2)
    that names file and key where a value is none that the command line could have."""
    if _FLAG not in parser._option_string_actions:
        return
    file = _stated_file(words)
    if file is None:
        return
    said: dict[str, str] = {}
    for key, value in _read(parser, file).items():
        found = _parsed(parser, f"{_FLAG} {file}: {key!r}", key, value)
        for name in found:
            if said.setdefault(name, key) != key:
                parser.error(f"{_FLAG} {file}: {said[name]!r} and {key!r} are the same flag; leave one of them out")
        parser.set_defaults(**found)


def _stated_file(words: Sequence[str]) -> str | None:
    """The last one; a missing value is argparse's to tell."""
    found = None
    for index, word in enumerate(words):
        if word == "--":
            break
        if word.startswith(f"{_FLAG}="):
            found = word.partition("=")[2]
        elif word == _FLAG and index + 1 < len(words):
            found = words[index + 1]
    return found


def _read(parser: "Parser", file: str) -> dict[str, Any]:
    import yaml  # here: no other command line should wait for it

    try:
        if Path(file).stat().st_size > _MAX_BYTES:
            parser.error(f"{_FLAG} {file}: larger than {_MAX_BYTES} bytes")
        found = load_yaml(Path(file).read_text(encoding="utf-8"))
    except ConfigError as error:
        parser.error(f"{_FLAG} {file}: {error}")
    except OSError as error:
        parser.error(f"{_FLAG} {file}: cannot be read: {error.strerror}")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        parser.error(f"{_FLAG} {file}: not YAML: {one_line(' '.join(str(error).split()))[:300]}")
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        parser.error(f"{_FLAG} {file}: flags' names and their values are expected, as in `max-model-len: 4096`")
    return found


def _parsed(parser: "Parser", where: str, key: str, value: Any) -> dict[str, Any]:
    """Names of the parser and their values, as the command line would give them."""
    name = key.replace("_", "-").lstrip("-")
    if name == "model":
        if not isinstance(value, str) or not value:
            parser.error(f"{where}: text is expected, got {value!r:.200}")
        return {"model": value}
    action = parser._option_string_actions.get(f"--{name}")
    if name in ("config", "help"):
        parser.error(f"{where} is for the command line only; leave it out of the file")
    if action is None:
        close = parser.closest(f"--{name}")
        parser.error(f"{where} is no flag" + (f"; did you mean {close.removeprefix('--')!r}?" if close else ""))
    words = _words(parser, action, name, value)
    if words is None:
        parser.error(f"{where}: {value!r:.200} is no value of it")
    single = type(parser)(prog=parser.prog, allow_abbrev=False)
    single._add_action(action)
    single.error = lambda message: parser.error(f"{where}: {message}")  # type: ignore[method-assign]
    found = vars(single.parse_args(words))
    return {action.dest: found[action.dest]}


def _words(parser: "Parser", action: argparse.Action, name: str, value: Any) -> list[str] | None:
    """The value on a command line; [] where it is not worth saying; None where it cannot be said."""
    if isinstance(value, bool):
        word = f"--{name}" if value else f"--no-{name}"
        if action.nargs != 0:
            return None
        if word in action.option_strings:
            return [word]
        return [] if not value else None
    if value is None:
        return []
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value, default=str)]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)] if value else None
    return None if action.nargs == 0 else [f"--{name}={value}"]
