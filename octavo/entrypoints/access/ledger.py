"""How much of its limits each key has used, counted by all front ends together.

A file of fixed-size records, one a key, that every front end maps; whoever reads or writes holds the file's lock,
for some microseconds. One that is stopped while it holds the lock is waited for only once, and not for long: better a
count that is off by one than front ends that hang. When a front end dies the whole server does, and its folder goes
with it.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from octavo.entrypoints.access.api_keys import ApiKey

__all__ = ["Ledger", "Standing"]

_FILE = "api-keys"
# The key's digest; how many requests it may still make, and at what time that was so; how many are under way.
_RECORD = struct.Struct("=32sddq")
_COUNTS = struct.Struct("=ddq")
_COUNTS_OFFSET = 32
_PATIENCE_SECONDS = 1.0
_RETRY_SECONDS = 1.0  # where only the end of another request helps, which nobody can foretell


@dataclass(frozen=True, slots=True)
class Standing:
    """A key after a request has asked to be let in.

    Attributes:
        refusal: why it is not let in, or None.
        limit: the limit that the other two numbers are of: the one that refused it; else the requests a minute, where
            the key has such a limit.
        remaining: how many more requests would be let in.
        reset_seconds: until the whole limit is there again.
        retry_seconds: until another try may succeed.
    """

    refusal: str | None
    limit: int
    remaining: int
    reset_seconds: float
    retry_seconds: float = 0.0


class Ledger:
    """Args:

    keys: every front end has the same.
    folder: shared by the front ends; None: this is the only one.
    clock: seconds, the same for every process.
    """

    def __init__(
        self, keys: Sequence[ApiKey], folder: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._patience = _PATIENCE_SECONDS
        self._file = _open(folder)
        self._offsets: dict[bytes, int] = {}
        self.add(keys)

    def add(self, keys: Sequence[ApiKey]) -> None:
        """Makes records of those keys that have none yet."""
        with self._locked():
            self._file.seek(0)
            content = self._file.read()
            for offset in range(0, len(content), _RECORD.size):
                self._offsets[content[offset : offset + _COUNTS_OFFSET]] = offset
            for key in keys:
                if key.digest not in self._offsets:
                    self._offsets[key.digest] = self._file.tell()
                    self._file.write(_RECORD.pack(key.digest, key.requests_per_minute or 0, self._clock(), 0))
            self._records = mmap.mmap(self._file.fileno(), 0)

    def admit(self, key: ApiKey) -> Standing:
        """Counts a request, if the key may make another: ``release`` must follow when it has ended."""
        offset = self._offsets[key.digest] + _COUNTS_OFFSET
        with self._locked():
            left, since, running = _COUNTS.unpack_from(self._records, offset)
            now = self._clock()
            left = _refilled(key, left, now - since)
            refused = _refusal(key, left, running)
            if refused is None:
                left, running = left - 1, running + 1
            _COUNTS.pack_into(self._records, offset, left, now, running)
        return refused or _standing(key, left, running)

    def release(self, key: ApiKey) -> None:
        """A request that was let in has ended."""
        offset = self._offsets[key.digest] + _COUNTS_OFFSET
        with self._locked():
            left, since, running = _COUNTS.unpack_from(self._records, offset)
            _COUNTS.pack_into(self._records, offset, left, since, running - 1)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        is_held = self._lock()
        self._patience = _PATIENCE_SECONDS if is_held else 0.0
        try:
            yield
        finally:
            if is_held:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
            time.sleep(0.0001)


def _open(folder: Path | None) -> FileIO:
    """Without a buffer: others write to it."""
    if folder is None:
        descriptor, name = tempfile.mkstemp()
        os.unlink(name)
        return FileIO(descriptor, "r+b")
    return FileIO(os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")


def _refilled(key: ApiKey, left: float, seconds: float) -> float:
    per_minute = key.requests_per_minute
    return 0.0 if per_minute is None else min(float(per_minute), left + max(0.0, seconds) * per_minute / 60)


def _refusal(key: ApiKey, left: float, running: int) -> Standing | None:
    per_minute, at_once = key.requests_per_minute, key.max_concurrent_requests
    if per_minute is not None and left < 1:
        seconds = 60 / per_minute
        refusal = f"this API key may make {per_minute} requests a minute; try again later"
        return Standing(refusal, per_minute, 0, (per_minute - left) * seconds, (1 - left) * seconds)
    if at_once is not None and running >= at_once:
        refusal = f"this API key may have {at_once} requests under way at once; try again when one has ended"
        return Standing(refusal, at_once, 0, _RETRY_SECONDS, _RETRY_SECONDS)
    return None


def _standing(key: ApiKey, left: float, running: int) -> Standing:
    if key.requests_per_minute is not None:
        return Standing(
            None, key.requests_per_minute, int(left), (key.requests_per_minute - left) * 60 / key.requests_per_minute
        )
    assert key.max_concurrent_requests is not None
    return Standing(None, key.max_concurrent_requests, key.max_concurrent_requests - running, _RETRY_SECONDS)
