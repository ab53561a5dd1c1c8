"""Where an EngineCoreProc runs, as its front end sees it: a process of its own, or a thread of this one.

Both are started with an EngineLaunch, can be stopped at any moment and report the end, however it came.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from octavo.engine.child_process import ChildProcess
from octavo.engine.private_folder import remove_private_folder
from octavo.engine.serial import EngineLaunch, encode
from octavo.logging import init_logger

__all__ = ["EngineHost", "EngineProcess", "EngineThread", "early_engine", "engine_child"]

logger = init_logger(__name__)

_MODULE = "octavo.engine.core_proc"
# A process that was started before its front end knew what to launch in it.
_early: list[ChildProcess] = []


class EngineHost(Protocol):
    """``on_exit`` (given at construction) is called once with the exit code, from a thread of its own."""

    def stop(self, timeout: float) -> bool:
        """Ends the engine if it still runs, and returns when ``on_exit`` has been called; seconds. False: it did not
        end by itself."""
        ...


@contextlib.contextmanager
def early_engine() -> Iterator[Path]:
    """Starts the process of the next EngineProcess now: it imports what every engine needs while its front end does
    the same and finds the model. Gives the private folder that its sockets will be in. What was not used, and the
    folder, are gone after the block."""
    child = ChildProcess(_MODULE)
    _early.append(child)
    try:
        yield child.socket_dir
    finally:
        while _early:
            _early.pop().kill()
        remove_private_folder(child.socket_dir)


def engine_child() -> ChildProcess:
    """A process for an EngineProcess, with its private folder: the early one, or a new one."""
    return _early.pop() if _early else ChildProcess(_MODULE)


class EngineProcess:
    """The engine in a process of its own.

    Args:
        child: from ``engine_child``.
    """

    def __init__(self, child: ChildProcess, launch: EngineLaunch, on_exit: Callable[[int], None]) -> None:
        self._child = child
        self._waiter = child.on_exit(on_exit)
        child.send(encode(launch))

    @property
    def pid(self) -> int:
        return self._child.pid

    def stop(self, timeout: float) -> bool:
        """The engine ends by itself when its standard input does, whatever it computes; if it cannot, it is killed."""
        self._child.end_input()
        self._waiter.join(timeout)
        if not self._waiter.is_alive():
            return True
        was_hung = self._child.kill()  # one with very much memory takes its time to give it back
        self._waiter.join()
        if was_hung:
            logger.warning("the engine core process did not end within %g s, so it was killed", timeout)
        return not was_hung


class EngineThread:
    """The engine in this process: the same sockets, no isolation. For debugging."""

    def __init__(self, launch: EngineLaunch, on_exit: Callable[[int], None]) -> None:
        from octavo.engine.core_proc import EngineCoreProc

        self._proc = EngineCoreProc(launch)
        self._on_exit = on_exit
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """A thread cannot be killed: one that is still loading after ``timeout`` is left to end by itself."""
        self._proc.stop()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._on_exit(self._proc.run())
