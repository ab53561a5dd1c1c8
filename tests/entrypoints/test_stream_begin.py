"""A stream begins with its first output: until then every failure has its own status, and whatever becomes of it, what
was begun in the engine is ended."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from octavo.errors import EngineDeadError, OverloadedError, RequestError, RequestFailedError

COMPLETION = {"prompt": "hi", "max_tokens": 20, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "stream": True}
DOORS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
Connect = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("canary")
doors = pytest.mark.parametrize(("path", "body"), DOORS, ids=["completion", "chat"])


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(scenario(), 20)

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@doors
def test_nothing_is_sent_before_the_first_output(
    server: Any, connect: Connect, path: str, body: dict[str, Any]
) -> None:
    engine = server.engine

    async def scenario() -> None:
        engine.hold_after = 0
        connection = connect(server, path, body)
        await until(lambda: bool(engine.running))
        for _ in range(20):
            await asyncio.sleep(0)
        assert connection.silent
        engine.hold_after = None
        engine.release.set()
        head = await connection.next()
        assert head["status"] == 200
        assert (b"content-type", b"text/event-stream; charset=utf-8") in head["headers"]
        assert (await connection.rest()).endswith(b"data: [DONE]\n\n")

    run(scenario)
    assert engine.aborted == []


FAILURES = [
    (RequestError("too long", param="input_tokens"), 400),
    (OverloadedError("the queue is full"), 503),
    (RequestFailedError("NaN"), 500),
    (RuntimeError("secret"), 500),
    (EngineDeadError("killed"), 503),
]


@pytest.mark.parametrize(("failure", "code"), FAILURES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("door", ["complete", "chat"])
def test_a_failure_before_the_first_output_has_its_own_status(
    server: Any, error: Callable[..., Any], door: str, failure: Exception, code: int
) -> None:
    server.engine.fail_after = (0, failure)
    response = getattr(server, door)(stream=True)
    error(response, code)
    assert ("retry-after" in response.headers) == (code == 503)
    assert response.headers["x-request-id"]
    server.engine.fail_after = None


@pytest.mark.parametrize("door", ["complete", "chat"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_for_now_says_when_to_come_again(server: Any, door: str, stream: bool) -> None:
    server.engine.fail_after = (0, OverloadedError("the queue is full", retry_after=17))
    assert getattr(server, door)(stream=stream).headers["retry-after"] == "17"
    server.engine.fail_after = None


def test_one_of_many_prompts_that_fails_at_once_ends_them_all_with_its_status(
    server: Any, error: Callable[..., Any]
) -> None:
    server.engine.fail_after = (0, OverloadedError("the queue is full"))
    error(server.complete(prompt=["a", "b", "c"], stream=True), 503)
    assert server.engine.running == set()
    server.engine.fail_after = None


def test_the_first_event_may_be_all_there_is(server: Any, events: Callable[..., Any]) -> None:
    found = events(server.complete(max_tokens=1, stream=True, stream_options={"include_usage": True}))
    assert [len(chunk["choices"]) for chunk in found] == [1, 0]


@doors
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_the_end_of_the_server_leaves_nothing_running(
    server: Any, connect: Connect, path: str, body: dict[str, Any], tokens: int
) -> None:
    engine = server.engine

    async def scenario() -> None:
        engine.hold_after = tokens
        connection = connect(server, path, body)
        await until(lambda: bool(engine.running))
        if tokens:
            await connection.next()
        await connection.give_up()
        assert len(server.state.active) == 0

    run(scenario)
    assert engine.aborted == engine.started
    assert len(engine.aborted) == 1
    engine.hold_after = None


@doors
@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_a_connection_that_fails_leaves_nothing_running(
    server: Any, connect: Connect, path: str, body: dict[str, Any], writes: int
) -> None:
    engine = server.engine

    async def scenario() -> None:
        connection = connect(server, path, body, writes=writes)
        await until(lambda: bool(engine.aborted))
        await connection.give_up()

    run(scenario)
    assert engine.aborted == engine.started
    assert len(server.state.active) == 0


@doors
def test_requests_that_wait_are_ended_with_a_status(
    server: Any, connect: Connect, path: str, body: dict[str, Any]
) -> None:
    engine = server.engine

    async def scenario() -> None:
        engine.hold_after = 0
        connection = connect(server, path, body)
        await until(lambda: bool(engine.running))
        server.state.active.end_all(EngineDeadError("killed"))
        assert (await connection.next())["status"] == 503
        assert b'"code":503' in await connection.rest()

    run(scenario)
    assert len(engine.aborted) == 1
    server.state.active.ended_by = None
    engine.hold_after = None


@doors
def test_a_request_that_comes_after_the_end_begins_nothing(
    server: Any, connect: Connect, path: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        server.state.active.end_all(EngineDeadError("killed"))
        connection = connect(server, path, body)
        assert (await connection.next())["status"] == 503
        await connection.rest()

    run(scenario)
    assert server.engine.started == []
    server.state.active.ended_by = None
