"""A signal at any moment of the start ends the whole server, with the signal's exit code and without a traceback."""

import signal
import time
from collections.abc import Callable

import pytest

from tests.faults.server_process import NOTICED_SECONDS, START_SECONDS, Server, blocked_signals, wait_until

# Seconds from when octavo holds signals, which is what it begins with, to when the model is loading, and when all is
# about to be ready. What is before that is the interpreter's own start.
MOMENTS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.8, 1.0, 1.1, 1.2, 1.3)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_of_the_start(start: Callable[..., Server], signum: int) -> None:
    for seconds in MOMENTS:
        server = start("--api-server-count", "2")
        assert wait_until(lambda pid=server.process.pid: len(blocked_signals(pid)) == 2, START_SECONDS)
        time.sleep(seconds)
        server.signal(signum)
        code = server.wait_exit(START_SECONDS)
        # On a fast machine all may be ready.
        expected = 0 if server.said("Octavo is ready") else 128 + signum
        assert code == expected, (seconds, code, server.lines)
        assert server.said("Traceback") is None, (seconds, server.lines)
        assert wait_until(server.left_nothing, NOTICED_SECONDS), (seconds, server.left())
