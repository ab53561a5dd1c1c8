"""What /live, /ready and /health say in each state of the server, and what the service manager is told."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.engine import Pulse
from octavo.entrypoints import service_manager, watch
from octavo.entrypoints.front_end_beats import FrontEndBeats
from octavo.entrypoints.service_manager import ServiceManager
from octavo.entrypoints.watch import EngineWatch
from octavo.errors import EngineDeadError

OVERDUE = Pulse(True, False, "step 7 (3 tokens) has taken 61 s so far")
STUCK = Pulse(True, True, "step 7 (3 tokens) has taken 610 s so far")


def codes(server: Any) -> tuple[int, int, int]:
    return tuple(server.get(path).status_code for path in ("/live", "/ready", "/health"))  # type: ignore[return-value]


def loading(server: Any) -> None:
    server.state.services = None


def draining(server: Any) -> None:
    server.state.draining = True


def overdue(server: Any) -> None:
    server.engine.how_it_does = OVERDUE


def stuck(server: Any) -> None:
    server.engine.how_it_does = STUCK


def dead(server: Any) -> None:
    server.engine.dead_error = EngineDeadError("killed by signal 9")


def well(server: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("become", "live", "ready", "health"),
    [
        (well, 200, 200, 200),
        (loading, 200, 503, 503),
        (draining, 200, 503, 200),
        (overdue, 200, 503, 200),
        (stuck, 503, 503, 200),
        (dead, 503, 503, 503),
    ],
)
def test_what_each_probe_says(server: Any, become: Callable[[Any], None], live: int, ready: int, health: int) -> None:
    become(server)
    assert codes(server) == (live, ready, health)
    for path in ("/live", "/ready", "/health"):
        head = server.request("HEAD", path)
        assert head.status_code == server.get(path).status_code
        assert server.post(path).status_code == 405


def test_the_cause_is_told(server: Any) -> None:
    overdue(server)
    assert server.get("/ready").json() == {"status": "overdue", "cause": OVERDUE.cause}
    stuck(server)
    assert server.get("/live").json() == {"status": "stuck", "cause": STUCK.cause}
    dead(server)
    assert server.get("/ready").json() == {"status": "dead", "cause": "killed by signal 9"}
    server.engine.how_it_does = Pulse()
    loading(server)
    assert server.get("/ready").json() == {"status": "loading", "stage": "starting"}


def test_an_engine_that_is_silent_while_it_loads_is_told(server: Any) -> None:
    loading(server)
    overdue(server)
    assert server.get("/health").json()["cause"] == OVERDUE.cause
    assert codes(server) == (200, 503, 503)
    stuck(server)
    assert server.get("/live").json() == {"status": "stuck", "cause": STUCK.cause}
    assert codes(server) == (503, 503, 503)


def test_other_front_ends_that_are_silent_are_told_once_requests_are_served(server: Any, tmp_path: Path) -> None:
    now = 1000.0
    one, other = (FrontEndBeats(tmp_path, index, 2, lambda: now) for index in range(2))
    server.state.beats = one
    other.beat()
    now += 9.9
    assert codes(server) == (200, 200, 200)
    now += 0.2
    assert server.get("/ready").json() == {
        "status": "overdue",
        "cause": "front end 1 of 2 has shown no sign of life for 10 s",
    }
    now += 110
    assert codes(server) == (503, 503, 200)
    other.beat()
    assert codes(server) == (200, 200, 200)
    now += 20
    loading(server)
    assert codes(server) == (200, 503, 503)


def test_a_front_end_that_has_ended_in_good_order_is_not_missed(server: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        now = 1000.0
        one, other = (FrontEndBeats(tmp_path, index, 2, lambda: now) for index in range(2))
        running = asyncio.create_task(other.run())
        await asyncio.sleep(0)
        now += 1000
        assert one.pulse().is_stuck
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert one.pulse() == Pulse()

    asyncio.run(scenario())


def test_readiness_comes_back(server: Any) -> None:
    overdue(server)
    assert server.get("/ready").status_code == 503
    server.engine.how_it_does = Pulse()
    assert server.get("/ready").json() == {"status": "ok"}


def test_requests_are_served_while_the_engine_is_overdue(server: Any) -> None:
    """It is for the balancer to send them elsewhere; those that are here can only wait."""
    overdue(server)
    assert server.complete().status_code == 200


# ---- the service manager --------------------------------------------------------------------------------------------


@pytest.fixture
def manager_socket(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10)
        yield sock


def heard(sock: socket.socket) -> str:
    return sock.recv(1000).decode()


def environment(sock: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": sock.getsockname()} | more


def test_a_service_manager_is_told_of_beginning_life_and_end(manager_socket: socket.socket) -> None:
    manager = ServiceManager(environment(manager_socket))
    for say in (manager.ready, manager.alive, manager.stopping):
        say()
    assert [heard(manager_socket) for _ in range(3)] == ["READY=1", "WATCHDOG=1", "STOPPING=1"]


def test_an_abstract_socket_is_found() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        name = f"octavo-test-{os.getpid()}"
        sock.bind(f"\0{name}")
        sock.settimeout(10)
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert heard(sock) == "READY=1"


def test_without_a_service_manager_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_manager.socket, "socket", lambda *args: pytest.fail("nobody is there"))
    manager = ServiceManager({"WATCHDOG_USEC": "5000000"})
    manager.ready()
    assert manager.watchdog_seconds is None


def test_a_socket_that_is_gone_is_only_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "none")}).ready()
    assert "NOTIFY_SOCKET does not take READY=1: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_hears_twice_in_its_time(
    manager_socket: socket.socket, more: dict[str, str], seconds: float | None
) -> None:
    assert ServiceManager(environment(manager_socket, **more)).watchdog_seconds == seconds


def test_the_watchdog_hears_as_long_as_the_server_is_live(server: Any, manager_socket: socket.socket) -> None:
    manager = ServiceManager(environment(manager_socket, WATCHDOG_USEC="20000"))

    async def scenario() -> None:
        watching = asyncio.create_task(EngineWatch(server.state, manager).run())
        for become in (well, overdue):
            become(server)
            for _ in range(3):
                assert await asyncio.to_thread(heard, manager_socket) == "WATCHDOG=1"
        stuck(server)
        await asyncio.sleep(0.1)
        manager_socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # what was said before
                heard(manager_socket)
        await asyncio.sleep(0.1)
        with pytest.raises(BlockingIOError):
            heard(manager_socket)
        watching.cancel()

    asyncio.run(scenario())


def test_the_log_has_a_line_when_the_engine_is_overdue_and_one_when_it_goes_on(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "_SECONDS", 0.001)

    async def scenario() -> None:
        watching = asyncio.create_task(EngineWatch(server.state, ServiceManager({})).run())
        for pulse in (Pulse(), OVERDUE, Pulse()):
            server.engine.how_it_does = pulse
            await asyncio.sleep(0.05)
        watching.cancel()

    asyncio.run(scenario())
    told = capsys.readouterr().err
    assert told.count("the engine is overdue") == 1
    assert told.count(OVERDUE.cause) == 1
    assert told.count("the engine goes on") == 1
