"""The server's private folder, which every end of the server removes; and a socket elsewhere that goes with it."""

import contextlib
import os
import shutil
from pathlib import Path

__all__ = ["has_note", "note_socket", "remove_noted_socket", "remove_private_folder"]

_NOTE = "socket-elsewhere"


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
