"""The lines of a batch file as they are wanted: a few at a time, however long the file; none longer than allowed."""

import asyncio
import contextlib
import os
import stat
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from octavo.errors import ConfigError

__all__ = ["LONGEST_LINE", "InputLine", "count_lines", "open_input", "read_lines"]

LONGEST_LINE = 32 * 1024 * 1024
_AHEAD = 16  # lines that wait to be taken
_BLOCK = 1 << 20


class InputLine(NamedTuple):
    """``text`` is None where the line was too long to be kept. ``number``: from 1."""

    number: int
    text: bytes | None


def open_input(path: str) -> BinaryIO:
    """``-`` is standard input. Raises ConfigError."""
    if path == "-":
        return open(0, "rb", closefd=False)  # not sys.stdin: at its end the interpreter would want its lock
    if path.startswith(("http://", "https://")):
        raise ConfigError(
            f"--input-file {path}: files are read from this machine; fetch it first, or give - for a pipe"
        )
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise ConfigError(f"--input-file {path} cannot be read: {error.strerror}") from None


def count_lines(file: BinaryIO) -> int | None:
    """How many there are, roughly; None where nobody knows yet. The file stands where it stood."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return None
    at = file.tell()
    count = 0
    while block := file.read(_BLOCK):
        count += block.count(b"\n")
    file.seek(at)
    return count


async def read_lines(file: BinaryIO) -> AsyncGenerator[InputLine, None]:
    """Yields lines that are not blank. The file is read in a thread of its own, for it may be a pipe that nobody fills;
    and only ``_AHEAD`` lines ahead. It is that thread's from now on: to close it one would have to wait for the pipe.

    Raises:
        ConfigError: it cannot be read on.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[InputLine | OSError | None] = asyncio.Queue()
    room = threading.Semaphore(_AHEAD)

    def put(item: InputLine | OSError | None) -> None:
        room.acquire()
        loop.call_soon_threadsafe(queue.put_nowait, item)

    def read() -> None:
        number = 0
        with file, contextlib.suppress(RuntimeError):  # the loop may end before the file does
            try:
                while line := file.readline(LONGEST_LINE + 1):
                    number += 1
                    is_whole = len(line) <= LONGEST_LINE
                    while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                        line = file.readline(LONGEST_LINE + 1)
                    if not is_whole or line.strip():
                        put(InputLine(number, line.strip() if is_whole else None))
            except OSError as error:
                put(error)
            put(None)

    threading.Thread(target=read, daemon=True, name="octavo-batch-input").start()
    while (item := await queue.get()) is not None:
        room.release()
        if isinstance(item, OSError):
            raise ConfigError(f"--input-file cannot be read on: {item.strerror}")
        yield item
