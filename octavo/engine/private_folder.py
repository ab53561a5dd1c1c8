"""The server's private folder, which every end of the server removes; and a socket elsewhere that goes with it."""

import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from octavo.errors import ConfigError

__all__ = [
    "has_note",
    "make_private_folder",
    "name_private_folder",
    "note_socket",
    "remove_noted_socket",
    "remove_private_folder",
]

_NOTE = "socket-elsewhere"


def name_private_folder() -> Path:
    """Of a folder that is not there yet. ConfigError if there is no place for one."""
    try:
        root = tempfile.gettempdir()
    except OSError:
        raise ConfigError("there is no folder for temporary files that can be written to; set TMPDIR to one") from None
    return Path(root) / f"octavo-{secrets.token_hex(8)}"


def make_private_folder(folder: Path) -> None:
    """Mode 0700. ConfigError if it cannot be made."""
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"no folder for sockets can be made: {error.strerror}: {folder}; set TMPDIR") from error


def note_socket(path: Path, folder: Path | None) -> str:
    """What ``remove_noted_socket`` needs to know of a socket, which is also left in the server's folder, if it has one:
    whoever removes the folder removes the socket with it."""
    note = f"{path.absolute()}\n{_identity(path)}"
    if folder is not None:
        (folder / _NOTE).write_text(note)
    return note


def has_note(folder: Path) -> bool:
    """Whether a socket elsewhere relies on the folder."""
    return (folder / _NOTE).exists()


def remove_noted_socket(note: str) -> None:
    """Unless it is gone, or another server's by now."""
    path, _, identity = note.rpartition("\n")
    with contextlib.suppress(OSError):
        if _identity(Path(path)) == identity:
            Path(path).unlink()


def remove_private_folder(folder: Path) -> None:
    """Whoever else is doing the same, or has done it."""
    with contextlib.suppress(OSError):
        remove_noted_socket((folder / _NOTE).read_text())
    shutil.rmtree(folder, ignore_errors=True)


def _identity(path: Path) -> str:
    found = os.lstat(path)
    return f"{found.st_dev} {found.st_ino} {found.st_mtime_ns}"
