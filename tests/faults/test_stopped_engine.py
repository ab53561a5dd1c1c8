"""E3: every front end notices that an engine is stopped, and that it goes on; the service manager hears of it."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.server_process import Server, wait_until

BOUND = 10.0
LATENESS = 3.0


def probe(server: Server, path: str) -> list[int]:
    """Asked often enough that each of two front ends has answered."""
    return [server.http.get(server.url + path).status_code for _ in range(16)]


def heard(sock: socket.socket) -> list[str]:
    messages = []
    with contextlib.suppress(BlockingIOError):
        while True:
            messages.append(sock.recv(100).decode())
    return messages


def test_a_stopped_engine_is_noticed_and_so_is_its_going_on(start: Callable[..., Server], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        watched = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "4000000"}
        server = start("--api-server-count", "2", env=watched).wait_ready()
        assert wait_until(lambda: set(probe(server, "/ready")) == {200})
        assert heard(manager)[:2] == ["READY=1", "WATCHDOG=1"]

        os.kill(server.engine_pid, signal.SIGSTOP)
        stopped = time.monotonic()
        assert wait_until(lambda: set(probe(server, "/ready")) == {503}, BOUND + LATENESS)
        assert time.monotonic() - stopped > BOUND - LATENESS
        assert set(probe(server, "/live")) == {200}
        assert server.http.get(f"{server.url}/ready").json()["status"] == "overdue"
        server.wait_said("the engine is overdue")

        os.kill(server.engine_pid, signal.SIGCONT)
        assert wait_until(lambda: set(probe(server, "/ready")) == {200})
        server.wait_said("the engine goes on")
        assert sum("engine is overdue" in line for line in server.lines) == 1  # of one front end

        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        *words, last = heard(manager)
        assert words.count("WATCHDOG=1") == len(words) > 2
        assert last == "STOPPING=1"
    assert server.left_nothing()
