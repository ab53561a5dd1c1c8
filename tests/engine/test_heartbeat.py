"""The heartbeat: when an engine counts as overdue or stuck, and that what is written is what is read."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.engine import AsyncMPClient
from octavo.engine import heartbeat as module
from octavo.engine.heartbeat import Beat, Bounds, Heartbeat, HeartbeatView, Pulse, judge

BOUNDS = Bounds()
NOW = 10_000.0


def running(seconds: float, tokens: int = 1, slowest: float = 0.1, per_token: float = 0.01, beat: float = 0.0) -> Beat:
    """In a step for ``seconds``, the process seen ``beat`` seconds ago."""
    return Beat(NOW - beat, NOW - seconds, 7, tokens, slowest, per_token)


# ---- the judgement --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beat", "overdue", "stuck"),
    [
        (Beat(NOW), False, False),  # idle
        (running(9.9), False, False),
        (running(10.1), True, False),
        (running(119), True, False),
        (running(121), True, True),
        (running(20, slowest=5.0), False, False),  # others have taken long, too
        (running(26, slowest=5.0), True, False),
        (running(126, slowest=7.0), True, False),
        (running(141, slowest=7.0), True, True),
        (running(50, tokens=2048), False, False),  # a prefill, though none was measured yet
        (running(103, tokens=2048), True, False),
        (running(400, tokens=2048), True, False),
        (running(410, tokens=2048), True, True),
        (Beat(NOW - 9.9), False, False),
        (Beat(NOW - 10.1), True, False),  # stopped while idle
        (Beat(NOW - 121), True, True),
        (running(60, tokens=2048, beat=30), True, False),  # stopped in a long prefill
        (running(130, tokens=4096, beat=121), True, True),
    ],
)
def test_when_an_engine_is_overdue_and_when_it_is_stuck(beat: Beat, overdue: bool, stuck: bool) -> None:
    pulse = judge(beat, NOW, BOUNDS)
    assert (pulse.is_overdue, pulse.is_stuck) == (overdue, stuck)
    assert bool(pulse.cause) == overdue


def test_the_first_step_of_all_may_be_a_long_prefill() -> None:
    first = Beat(NOW, NOW - 200, 1, 2048)
    assert judge(first, NOW, BOUNDS) == Pulse()
    short = Beat(NOW, NOW - 200, 1, 8)
    assert judge(short, NOW, BOUNDS).is_overdue


def test_the_cause_says_what_is_known() -> None:
    assert judge(running(61.4, 3, slowest=4.0), NOW, BOUNDS).cause == (
        "step 7 (3 tokens) has taken 61 s so far, 20 s were expected at most"
    )
    assert judge(Beat(NOW - 33), NOW, BOUNDS).cause == "the engine's process has shown no sign of life for 33 s"


# ---- the file -------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """``clock(seconds)``: so much time passes. The beat is that of the beginning."""
    now = NOW

    def add(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(Heartbeat, "_beat", lambda self: None)
    return add


def test_what_is_written_is_read(tmp_path: Path, clock: Callable[[float], None]) -> None:
    heart = Heartbeat(tmp_path / "heartbeat")
    view = HeartbeatView(tmp_path / "heartbeat")
    (tmp_path / "heartbeat").unlink()  # nobody needs the name any more
    assert view.read() == Beat(NOW)
    clock(1)
    heart.begin_step(5, 64)
    assert view.read() == Beat(NOW, NOW + 1, 5, 64)
    clock(2)
    heart.end_step()
    assert view.read() == Beat(NOW, 0, 5, 64, 2, 2 / 64)
    heart.begin_step(6, 1)
    clock(0.5)
    heart.end_step()
    assert view.read() == Beat(NOW, 0, 6, 1, 2, 2 / 64)
    assert not view.pulse().is_overdue
    heart.begin_step(7, 1)
    clock(11)
    assert view.pulse().is_overdue
    heart.end_step()
    clock(-12)  # but for the beat, which stands still here
    assert view.pulse() == Pulse()


def test_only_its_owner_may_read_the_file(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "heartbeat").stop()
    assert (tmp_path / "heartbeat").stat().st_mode & 0o777 == 0o600


def test_a_step_that_was_stopped_for_long_does_not_excuse_the_next(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    heart, view = Heartbeat(tmp_path / "heartbeat"), HeartbeatView(tmp_path / "heartbeat")
    heart.begin_step(1, 1)
    clock(3600)
    heart.end_step()
    assert view.read().slowest_step == BOUNDS.floor
    heart.begin_step(2, 1)
    clock(60)
    heart.end_step()
    assert view.read().slowest_step == 50  # but a model that really is so slow is believed
    heart.begin_step(3, 1)
    clock(60)
    heart.end_step()
    assert view.read().slowest_step == 60


def test_whatever_a_reader_finds_between_two_writes_raises_no_alarm(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    """Each write of a beginning and an end is followed by a look."""
    heart, view = Heartbeat(tmp_path / "heartbeat"), HeartbeatView(tmp_path / "heartbeat")
    fields = heart._fields
    looks: list[Pulse] = []

    class Watched:
        def __getitem__(self, index: int) -> float:
            return fields[index]

        def __setitem__(self, index: int, value: float) -> None:
            fields[index] = value
            looks.append(judge(view.read()._replace(beat=time.monotonic()), time.monotonic(), BOUNDS))

    heart._fields = Watched()  # type: ignore[assignment]
    for step in range(1, 20):
        heart.begin_step(step, 4096 if step % 2 else 1)
        clock(200 if step % 2 else 0.01)
        heart.end_step()
        clock(3000)
    assert len(looks) > 19 * 4
    assert not any(pulse.is_overdue for pulse in looks)


def test_a_reader_that_is_interrupted_by_steps_never_mixes_them(tmp_path: Path, clock: Callable[[float], None]) -> None:
    heart, view = Heartbeat(tmp_path / "heartbeat"), HeartbeatView(tmp_path / "heartbeat")
    fields = view._fields
    heart.begin_step(1, 1)

    class Interrupted:
        """A step ends and another begins while the fields are being read."""

        def __init__(self, times: int) -> None:
            self.times = times

        def __iter__(self) -> Iterator[float]:
            found = list(fields)
            if self.times:
                self.times -= 1
                clock(300)
                heart.end_step()
                heart.begin_step(2, 4096)
            return iter(found)

        def __getitem__(self, index: int) -> float:
            return fields[index]

    view._fields = Interrupted(1)  # type: ignore[assignment]
    assert view.read()[1:4] == (time.monotonic(), 2, 4096)
    view._fields = Interrupted(100)  # type: ignore[assignment]
    assert view.read().started == 0  # it goes on, whatever it is in


# ---- the engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_engine_tells_of_each_step(kit: Any, make_core: Callable[..., Any], async_scheduling: bool) -> None:
    told: list[Any] = []

    class Told:
        def begin_step(self, step: int, num_tokens: int) -> None:
            told.append((step, num_tokens))

        def end_step(self) -> None:
            told.append("end")

    core = make_core(async_scheduling=async_scheduling)
    core.heartbeat = Told()
    core.add_request(kit.request("a", [1] * 5, 3))
    kit.run(core)
    assert told == [(1, 5), "end", (2, 1), "end", (3, 1), "end"]


def test_a_stopped_engine_is_seen_and_so_is_its_return(tiny_config: Any) -> None:
    """E3, while it is idle, with bounds that a test has the time for."""

    async def main() -> None:
        client = AsyncMPClient(tiny_config)
        try:
            await client.wait_ready()
            assert client.heartbeat is not None
            assert client.engine_pid is not None
            client.heartbeat.bounds = Bounds(floor=2.5, hard_floor=4.5)
            await asyncio.sleep(1.5)
            assert client.heartbeat.pulse() == Pulse()
            os.kill(client.engine_pid, signal.SIGSTOP)
            stopped = time.monotonic()
            while not (pulse := client.heartbeat.pulse()).is_overdue:
                await asyncio.sleep(0.05)
            assert 1 < time.monotonic() - stopped < 4
            assert "no sign of life" in pulse.cause
            assert not pulse.is_stuck
            while not client.heartbeat.pulse().is_stuck:
                await asyncio.sleep(0.05)
            os.kill(client.engine_pid, signal.SIGCONT)
            while client.heartbeat.pulse().is_overdue:
                await asyncio.sleep(0.01)
        finally:
            client.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_beat_stops_with_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEAT_SECONDS", 0.01)
    heart, view = Heartbeat(tmp_path / "heartbeat"), HeartbeatView(tmp_path / "heartbeat")
    first = view.read().beat
    while view.read().beat == first:
        time.sleep(0.001)
    heart.stop()
    time.sleep(0.05)
    last = view.read().beat
    time.sleep(0.05)
    assert view.read().beat == last
