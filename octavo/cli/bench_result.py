"""How the result of a benchmark is told: one JSON line on standard output, and in a file if that is wanted."""

import json
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

__all__ = ["check_file", "tell", "write_file"]


def check_file(flag: str, file: Path | None) -> None:
    """Before anything is measured. Raises ConfigError."""
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{flag}: there is no folder {file.parent}")


def tell(found: dict[str, Any], output_json: Path | None, whole: dict[str, Any] | None = None) -> None:
    """Args:

        whole: what stands in the file; None: the same.

    Raises:
        ConfigError: the file cannot be written; the line is out all the same, for it took its time.
    """
    print(json.dumps(found))
    if output_json is not None:
        write_file("--output-json", output_json, found if whole is None else whole)


def write_file(flag: str, file: Path, found: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(found) + "\n")
    except OSError as error:
        raise ConfigError(f"{flag}: {error}") from error
