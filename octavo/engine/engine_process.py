"""Where an EngineCoreProc runs, as its front end sees it: a process of its own, or a thread of this one.

Both are started with an EngineLaunch, can be stopped at any moment and report the end, however it came.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, Protocol

from octavo.engine.serial import EngineLaunch, encode

__all__ = ["EngineHost", "EngineProcess", "EngineThread", "describe_exit", "early_engine"]

# A process that was started before its front end knew what to launch in it.
_early: "list[subprocess.Popen[bytes]]" = []


class EngineHost(Protocol):
    """``on_exit`` (given at construction) is called once with the exit code, from a thread of its own."""

    def stop(self, timeout: float) -> None:
        """Ends the engine if it still runs, and returns when ``on_exit`` has been called; seconds."""
        ...


@contextlib.contextmanager
def early_engine() -> Iterator[None]:
    """Starts the process of the next EngineProcess now: it imports what every engine needs while its front end does
    the same and finds the model. A process that nothing was launched in ends with the block."""
    _early.append(_start())
    try:
        yield
    finally:
        while _early:
            process = _early.pop()
            process.kill()
            process.wait()


def _start() -> "subprocess.Popen[bytes]":
    # The same module search path as here, whatever it was made from, and nothing more (-P).
    search_path = os.pathsep.join(entry if entry else os.getcwd() for entry in sys.path)
    # Signals that reach every process are the front end's matter. The child inherits the mask, so that this holds from
    # its first instruction on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "octavo.engine.core_proc"],
            stdin=subprocess.PIPE,
            stdout=2,  # this process's standard output belongs to its user; what libraries print goes to stderr
            env=os.environ | {"PYTHONPATH": search_path},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class EngineProcess:
    """``python -m octavo.engine.core_proc``: never a fork, never an import of the caller's ``__main__``."""

    def __init__(self, launch: EngineLaunch, on_exit: Callable[[int], None]) -> None:
        self._process = _early.pop() if _early else _start()
        self._on_exit = on_exit
        self._waiter = threading.Thread(target=self._wait, name="engine-waiter", daemon=True)
        self._waiter.start()
        payload = encode(launch)
        with contextlib.suppress(BrokenPipeError):  # it is dead already: on_exit tells
            self._stdin().write(len(payload).to_bytes(8, "little") + payload)
            self._stdin().flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, timeout: float) -> None:
        """The engine ends by itself when its standard input does; if it cannot, it is killed."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin().close()
        self._waiter.join(timeout)
        if self._waiter.is_alive():
            self._process.kill()
            self._waiter.join()

    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _wait(self) -> None:
        self._on_exit(self._process.wait())


class EngineThread:
    """The engine in this process: the same sockets, no isolation. For debugging."""

    def __init__(self, launch: EngineLaunch, on_exit: Callable[[int], None]) -> None:
        from octavo.engine.core_proc import EngineCoreProc

        self._proc = EngineCoreProc(launch)
        self._on_exit = on_exit
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """A thread cannot be killed: one that is still loading after ``timeout`` is left to end by itself."""
        self._proc.stop()
        self._thread.join(timeout)

    def _run(self) -> None:
        self._on_exit(self._proc.run())


def describe_exit(exit_code: int) -> str:
    """The cause to tell, where the engine had no last words."""
    if exit_code >= 0:
        return f"engine core process exited with code {exit_code}"
    try:
        name = f" ({signal.Signals(-exit_code).name})"
    except ValueError:
        name = ""
    return f"engine core process was killed by signal {-exit_code}{name}"
