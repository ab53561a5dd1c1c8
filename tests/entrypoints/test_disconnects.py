"""A client that goes away ends its request, at any moment and in any form; nobody else's."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from octavo.entrypoints.active_requests import ActiveRequests
from octavo.errors import EngineDeadError

COMPLETION = {"prompt": "hi", "max_tokens": 20}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
DOORS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
Connect = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("canary")


async def until(condition: Callable[[], bool]) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), 5)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


@pytest.mark.parametrize(("path", "body"), DOORS)
@pytest.mark.parametrize("tokens", [0, 3], ids=["queued", "generating"])
@pytest.mark.parametrize("stream", [True, False])
def test_the_request_of_a_client_that_leaves_is_aborted(
    server: Any, connect: Connect, path: str, body: dict[str, Any], tokens: int, stream: bool
) -> None:
    engine = server.engine

    async def scenario() -> None:
        engine.hold_after = tokens
        connection = connect(server, path, body | {"stream": stream})
        await until(lambda: bool(engine.running))
        if stream and tokens:  # nothing is sent before the first output
            assert (await connection.next())["status"] == 200
            for _ in range(tokens):
                assert b"data: " in (await connection.next())["body"]
        await connection.leave()
        engine.hold_after = None

    run(scenario)
    assert engine.aborted == engine.started
    assert len(engine.aborted) == 1
    assert len(server.state.active) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_stays_gets_everything(server: Any, connect: Connect, stream: bool) -> None:
    """The control: without leaving nothing is aborted."""

    async def scenario() -> None:
        connection = connect(server, "/v1/completions", COMPLETION | {"stream": stream})
        assert (await connection.next())["status"] == 200
        assert b"length" in await connection.rest()

    run(scenario)
    assert server.engine.aborted == []
    assert len(server.engine.started) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_all_prompts_of_a_request_are_aborted(server: Any, connect: Connect, stream: bool) -> None:
    engine = server.engine

    async def scenario() -> None:
        engine.hold_after = 2
        connection = connect(server, "/v1/completions", COMPLETION | {"prompt": ["a", "b", "c"], "stream": stream})
        await until(lambda: len(engine.running) == 3)
        await connection.leave()
        engine.hold_after = None

    run(scenario)
    assert sorted(engine.aborted) == sorted(engine.started)
    assert len(engine.aborted) == 3


def test_a_client_that_leaves_within_its_body_starts_nothing(server: Any, connect: Connect) -> None:
    async def scenario() -> None:
        await connect(server, "/v1/completions", COMPLETION, cut_off=True).leave()

    run(scenario)
    assert server.engine.started == []


def test_neighbours_go_on(server: Any, connect: Connect) -> None:
    engine = server.engine

    async def scenario() -> None:
        engine.hold_after = 2
        staying = connect(server, "/v1/completions", COMPLETION)
        leaving = connect(server, "/v1/completions", COMPLETION | {"stream": True})
        await until(lambda: len(engine.running) == 2)
        await leaving.leave()
        engine.hold_after = None
        engine.release.set()
        assert b"abcdefghijklmnopqrst" in await staying.rest()

    run(scenario)
    assert len(engine.aborted) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_requests_under_way_are_ended_with_the_reason_when_the_server_ends(
    server: Any, connect: Connect, stream: bool
) -> None:
    engine = server.engine
    state = server.state

    async def scenario() -> None:
        engine.hold_after = 2
        connection = connect(server, "/v1/completions", COMPLETION | {"stream": stream})
        await until(lambda: bool(engine.running))
        assert not await state.active.wait_idle(0)
        state.active.end_all(EngineDeadError("Killed /somewhere"))
        text = (await connection.rest()).decode()
        assert '"code":503' in text
        assert "Killed" not in text
        assert text.endswith("data: [DONE]\n\n") == stream
        assert await state.active.wait_idle(5)
        late = await connect(server, "/v1/completions", COMPLETION).rest()
        assert b'"code":503' in late

    run(scenario)
    assert len(engine.aborted) == 1
    state.active.ended_by = None
    engine.hold_after = None


def test_work_ends_with_its_caller() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def scenario() -> None:
        active = ActiveRequests()
        assert await active.wait_idle(0)
        caller = asyncio.create_task(active.run(work(), asyncio.Event().wait))  # type: ignore[arg-type]
        await until(lambda: len(active) == 1)
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert len(active) == 0

    run(scenario)
    assert ended == [True]


def test_bodies_that_are_large_together_are_refused_while_they_are(make_server: Any, connect: Connect) -> None:
    """C5, with many clients: each body is within its bound. Small ones always find room."""
    server = make_server(max_body_bytes=200_000)
    large = COMPLETION | {"user": "x" * 190_000}

    async def scenario() -> None:
        arriving = [connect(server, "/v1/completions", large, cut_off=True) for _ in range(8)]
        await asyncio.sleep(0)
        whole = connect(server, "/v1/completions", large)
        assert (await whole.next())["status"] == 503
        assert b"try again later" in await whole.rest()
        small = connect(server, "/v1/completions", COMPLETION)
        assert (await small.next())["status"] == 200
        await small.rest()
        for connection in arriving:
            await connection.leave()
        again = connect(server, "/v1/completions", large)
        assert (await again.next())["status"] == 200
        await again.rest()

    run(scenario)
    assert len(server.engine.started) == 2
