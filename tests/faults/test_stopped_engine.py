"""E3: whoever is stopped, the engine or one of several front ends, loading or loaded: those that go on tell, and tell
when it goes on again; the service manager hears of it."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.faults.server_process import Server, wait_until
from tests.faults.test_front_ends import further

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
        told: list[str] = []
        assert wait_until(lambda: told.extend(heard(manager)) or len(told) >= 2)
        assert told[:2] == ["READY=1", "WATCHDOG=1"]

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


def test_an_engine_that_is_stopped_while_it_loads_is_told_and_may_go_on(start: Callable[..., Server]) -> None:
    server = start()
    os.kill(server.engine_pid, signal.SIGSTOP)
    server.wait_said("octavo is loading", BOUND)
    assert "cause" not in server.health()
    assert wait_until(lambda: "cause" in server.health(), BOUND + LATENESS), server.lines
    assert server.health()["cause"].startswith("the engine's process has shown no sign of life for ")
    assert set(probe(server, "/live")) == {200}
    server.wait_said("the engine is overdue")

    os.kill(server.engine_pid, signal.SIGCONT)
    server.wait_ready()
    server.wait_said("the engine goes on")
    assert server.complete().status_code == 200


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_front_end_is_told_by_the_other_which_goes_on(start: Callable[..., Server], stopped: int) -> None:
    server = start("--api-server-count", "2").wait_ready()
    process = psutil.Process(server.process.pid) if stopped == 0 else further(server)
    assert wait_until(lambda: set(probe(server, "/ready")) == {200})
    body = server.body()
    process.suspend()
    try:
        assert of_other(server, "GET", "/ready").status_code == 200  # so far
        says = f"front end {stopped} of 2 has shown no sign of life for "
        assert wait_until(lambda: says in of_other(server, "GET", "/ready").text, BOUND + LATENESS)
        assert of_other(server, "GET", "/ready").status_code == 503
        assert of_other(server, "POST", "/v1/completions", json=body).status_code == 200
        if stopped == 1:
            server.wait_said("a front end is overdue")
    finally:
        process.resume()
    assert wait_until(lambda: set(probe(server, "/ready")) == {200})
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0


@pytest.mark.parametrize("stopped", ["the engine core process", "front end 1"])
def test_a_server_whose_process_is_stopped_ends_when_told_to_and_says_what_was_wrong(
    start: Callable[..., Server], stopped: str
) -> None:
    """Where nobody is stopped it ends with 0: see above."""
    flags = ("--api-server-count", "2") if "front" in stopped else ()
    server = start(*flags, "--shutdown-timeout", "1").wait_ready()
    os.kill(further(server).pid if "front" in stopped else server.engine_pid, signal.SIGSTOP)
    server.signal(signal.SIGTERM)
    assert server.wait_exit(20) == 3
    assert server.lines[-1] == f"octavo: error: {stopped} did not end when it was told to, and was killed"
    assert server.left_nothing()


def of_other(server: Server, method: str, path: str, **body: Any) -> httpx.Response:
    """The answer of the front end that goes on: connections that the stopped one has got are given up."""
    while True:
        with contextlib.suppress(httpx.TimeoutException):
            return server.http.request(method, server.url + path, timeout=1.0, **body)
