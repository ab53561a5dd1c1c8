"""A Unix socket to listen on: made, taken over from a server that is gone, and removed again."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from octavo.errors import ConfigError

__all__ = ["listen_on_path"]

_LONGEST_PATH = 107
_LOCK_SECONDS = 5.0
# Whoever the umask lets (0007: the group too), and never others.
_MOST_PERMISSIONS = 0o660


def listen_on_path(path: Path, count: int, backlog: int) -> list[socket.socket]:
    """A socket that listens on ``path``, ``count`` times over.

    Raises:
        ConfigError: another server listens there, what is there is no socket, or there can be none.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(f"--uds {path}: longer than the {_LONGEST_PATH} bytes that a socket's path may have")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _folder_locked(path):  # two that start at once must not each take the other's socket for a stale one
            _remove_stale(path)
            sock.bind(os.fspath(path))
            os.chmod(path, os.stat(path).st_mode & _MOST_PERMISSIONS)  # nobody could connect yet
            sock.listen(backlog)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--uds {path}: cannot listen there: {error.strerror or error}") from None
    except ConfigError:
        sock.close()
        raise
    return [sock, *(sock.dup() for _ in range(count - 1))]


@contextlib.contextmanager
def _folder_locked(path: Path) -> Iterator[None]:
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + _LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"--uds {path}: another process keeps its folder locked") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(folder)


def _remove_stale(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds {path}: what is there is no socket; delete it, or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        found = probe.connect_ex(os.fspath(path))
    if found != errno.ECONNREFUSED:
        raise ConfigError(f"--uds {path} is in use; stop what uses it, or choose another path")
    path.unlink()
