"""The file of answers: what is in it already, and what is added, a whole line at a time.

A run that was killed can have left half a line at its end, which is dropped. So are answers that say that a request has
failed for now: it is asked again. One process writes at a time.
"""

import enum
import fcntl
import hashlib
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from octavo.entrypoints.batch.batch_line import is_transient
from octavo.errors import ConfigError

__all__ = ["Claim", "OutputFile"]

_BLOCK = 1 << 20


class _Response(msgspec.Struct):
    status_code: int


class _Answered(msgspec.Struct):
    id: str
    custom_id: str | None
    error: Any
    response: _Response | None = None


_decode = msgspec.json.Decoder(_Answered).decode


class Claim(enum.Enum):
    """What is to be done with a custom id."""

    NEW = "answer it"
    ANSWERED = "an earlier run has answered it"
    TWICE = "this run has seen it before"


class OutputFile:
    """Args:

    path: ``-`` is standard output, of which nothing is known.
    say: told of what was dropped, and why.

    Raises:
        ConfigError: it cannot be written, another process writes it, or it holds something else.

    Attributes:
        num_answered: answers that were there at the beginning.
    """

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self._path = path
        # Of custom ids eight bytes each: there may be millions.
        self._answered: set[bytes] = set()  # by earlier runs
        self._claimed: set[bytes] = set()  # by this one
        self._bad: Counter[str] = Counter()  # ids of lines that could not be answered
        self.num_answered = 0
        if path == "-":
            self._fd = os.dup(sys.stdout.fileno())
            return
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._failure("cannot be written", error) from None
        try:
            _lock(self._fd, path)
            with open(path, "rb") as file:
                self._take_in(file, say)
        except BaseException:
            self.close()
            raise

    def _take_in(self, file: BinaryIO, say: Callable[[str], None]) -> None:
        if not file.seekable():
            return
        end = 0
        failed: list[tuple[int, int]] = []  # where such lines begin and end
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                say(f"{self._path}: its last line is torn ({len(line)} bytes); it is dropped")
                os.ftruncate(self._fd, end)
                break
            begin, end = end, end + len(line)
            try:
                answered = _decode(line)
            except (msgspec.MsgspecError, RecursionError):
                raise ConfigError(
                    f"--output-file {self._path}: line {number} is no answer of a batch; name another file"
                ) from None
            if answered.response is not None and is_transient(answered.response.status_code):
                failed.append((begin, end))
                continue
            if answered.error is None and answered.custom_id is not None:
                self._answered.add(_digest(answered.custom_id))
            else:
                self._bad[answered.id] += 1
            self.num_answered += 1
        if failed:
            say(f"{self._path}: {len(failed)} requests have failed for now; they are asked again")
            self._drop(file, failed, end)

    def _drop(self, file: BinaryIO, parts: list[tuple[int, int]], size: int) -> None:
        """Puts a file without these parts in the place of this one: at no moment is there less than was kept."""
        place = os.path.realpath(self._path)
        try:
            other = os.open(f"{place}.new", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                _lock(other, self._path)
                os.fchmod(other, stat.S_IMODE(os.fstat(self._fd).st_mode))
                kept = 0
                for begin, end in [*parts, (size, size)]:
                    _copy(file, kept, begin, other)
                    kept = end
                os.fsync(other)
                os.replace(f"{place}.new", place)
            except BaseException:
                os.close(other)
                raise
        except OSError as error:
            raise self._failure("cannot be rewritten", error) from None
        os.close(self._fd)
        self._fd = other

    def claim(self, custom_id: str) -> Claim:
        """To be called once for each line that has an id."""
        digest = _digest(custom_id)
        if digest in self._claimed:
            return Claim.TWICE
        self._claimed.add(digest)
        return Claim.ANSWERED if digest in self._answered else Claim.NEW

    def told_bad(self, line_id: str) -> bool:
        """Whether an earlier run has told of this line; each line of that text once."""
        if not self._bad[line_id]:
            return False
        self._bad[line_id] -= 1
        return True

    def add(self, line: bytes) -> None:
        """Raises ConfigError if the file takes no more."""
        try:
            _write(self._fd, line)
        except OSError as error:
            raise self._failure("cannot be written on", error) from None

    def close(self) -> None:
        os.close(self._fd)

    def _failure(self, what: str, error: OSError) -> ConfigError:
        return ConfigError(f"--output-file {self._path} {what}: {error.strerror}")


def _lock(descriptor: int, path: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--output-file {path}: another process is writing it") from None
    except OSError:  # no regular file, or a file system without locks
        return


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _copy(file: BinaryIO, begin: int, end: int, descriptor: int) -> None:
    file.seek(begin)
    while begin < end and (block := file.read(min(_BLOCK, end - begin))):
        _write(descriptor, block)
        begin += len(block)


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(), digest_size=8).digest()
