"""A child process of a server, and the pipe that both live by.

The child's standard input carries messages: the server's private folder first, then what its module is told. The end
of the pipe, however it comes, is the end of the child, whatever its threads are in: at once, or a moment later if it
has something to say before. It removes the folder, for whoever made it is gone or has done so.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from octavo.engine.private_folder import make_private_folder, name_private_folder, remove_private_folder

__all__ = ["ChildProcess", "LifeLine", "describe_exit"]

# Length of a message, in front of it.
_SIZE_BYTES = 8


class ChildProcess:
    """``python -m MODULE``: never a fork, never an import of the caller's ``__main__``.

    Args:
        module: reads its standard input with a LifeLine.
        socket_dir: the server's private folder; None: makes one.
        pass_fds: file descriptors that it inherits.

    Attributes:
        socket_dir: mode 0700.
    """

    def __init__(self, module: str, socket_dir: Path | None = None, pass_fds: Sequence[int] = ()) -> None:
        self.socket_dir = socket_dir or name_private_folder()
        self._process = _start(module, pass_fds)
        # The child knows the folder before it is there: from then on there is no moment at which it could be left.
        self.send(str(self.socket_dir).encode())
        if socket_dir is None:
            try:
                make_private_folder(self.socket_dir)
            except BaseException:
                self.kill()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes) -> None:
        """One more message. A child that is dead does not hear it: who waits for it is told."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            pipe = self._stdin()
            pipe.write(len(message).to_bytes(_SIZE_BYTES, "little") + message)
            pipe.flush()

    def end_input(self) -> None:
        """Asks it to end."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin().close()

    def kill(self) -> bool:
        """Ends it now; returns when it is gone. Whether that was what ended it: it may have been about to."""
        self._process.kill()
        exit_code = self._process.wait()
        self.end_input()
        return exit_code == -signal.SIGKILL

    def on_exit(self, tell: Callable[[int], None]) -> threading.Thread:
        """``tell`` is called once with the exit code, from the thread that is returned."""
        waiter = threading.Thread(target=lambda: tell(self._process.wait()), name="child-waiter", daemon=True)
        waiter.start()
        return waiter

    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin


def _start(module: str, pass_fds: Sequence[int]) -> "subprocess.Popen[bytes]":
    # The same module search path as here, whatever it was made from, and nothing more (-P).
    search_path = os.pathsep.join(entry if entry else os.getcwd() for entry in sys.path)
    # A Ctrl-C at the terminal and a service manager's SIGTERM reach every process; what they mean is the first one's
    # matter. The child inherits the mask, so that this holds from its first instruction on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=2,  # this process's standard output belongs to its user; what libraries print goes to stderr
            env=os.environ | {"PYTHONPATH": search_path},
            pass_fds=pass_fds,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LifeLine:
    """The child's end of the pipe. Reads from construction on, in a thread of its own; ends the process when the pipe
    does.

    Args:
        on_message: told of every message but the first.
        logger: where to say that it failed.
        on_end: called when the pipe has ended. The process then has ``last_words_seconds`` to end by itself.
    """

    def __init__(
        self,
        on_message: Callable[[bytes], None],
        logger: logging.Logger,
        on_end: Callable[[], None] | None = None,
        last_words_seconds: float = 0.0,
    ) -> None:
        # The first process decides what a signal means, and whether running requests finish first.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._on_message = on_message
        self._logger = logger
        self._on_end = on_end
        self._last_words_seconds = last_words_seconds
        threading.Thread(target=self._watch, name="life-line", daemon=True).start()

    def _watch(self) -> None:
        socket_dir = None
        exit_code = 0
        try:
            socket_dir = _read_message().decode()
            while True:
                self._on_message(_read_message())
        except EOFError:
            pass
        except Exception as error:
            self._logger.error("a message of the first process cannot be understood: %s", error)
            exit_code = 3
        finally:
            if socket_dir is not None:
                remove_private_folder(Path(socket_dir))
            if self._on_end is not None:
                self._on_end()
                time.sleep(self._last_words_seconds)
            os._exit(exit_code)


def _read_message() -> bytes:
    return _read_exactly(int.from_bytes(_read_exactly(_SIZE_BYTES), "little"))


def _read_exactly(size: int) -> bytes:
    """``size`` bytes of standard input."""
    chunks = bytearray()
    while len(chunks) < size:
        chunk = os.read(0, size - len(chunks))
        if not chunk:
            raise EOFError
        chunks += chunk
    return bytes(chunks)


def describe_exit(name: str, exit_code: int) -> str:
    """The cause to tell, where a child had no last words."""
    if exit_code >= 0:
        return f"{name} process exited with code {exit_code}"
    try:
        signal_name = f" ({signal.Signals(-exit_code).name})"
    except ValueError:
        signal_name = ""
    return f"{name} process was killed by signal {-exit_code}{signal_name}"
