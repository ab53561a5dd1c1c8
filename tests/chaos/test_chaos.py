"""Chaos in short, and that what it looks at can fail."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from tests.chaos.__main__ import Tally, main
from tests.faults.http_client import Connection, Outcome
from tests.faults.questions import Question

QUESTION = Question({"prompt": [5, 6]}, "whole answer", 2, 12)
USAGE = {"prompt_tokens": 2, "completion_tokens": 12}
BODY = json.dumps({"choices": [{"text": "whole answer", "finish_reason": "length"}], "usage": USAGE}).encode()
EVENT = b"data: " + BODY + b"\n\n"
DONE = b"data: [DONE]\n\n"


def test_a_short_time_of_chaos_has_no_faults() -> None:
    assert main(["--seconds", "12", "--every", "2"]) == 0


def plain(body: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(body) if length is None else length) + body


def stream(*events: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + end


def answer_of(server_says: bytes) -> Outcome:
    """What a client makes of a server that says this and hangs up."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(server_says)
        await writer.drain()
        writer.close()

    async def ask() -> Outcome:
        server = await asyncio.start_server(say, "127.0.0.1", 0)
        async with server:
            return await Connection("127.0.0.1", server.sockets[0].getsockname()[1]).complete({"prompt": [5, 6]})

    scenario: Callable[[], Awaitable[Outcome]] = ask
    return asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize(
    ("server_says", "kind"),
    [
        (plain(BODY), "whole"),
        (stream(EVENT, DONE), "whole"),
        (plain(BODY, length=1000), "cut within a 200"),
        (stream(EVENT, end=b""), "cut within a 200"),
        (stream(EVENT, DONE, end=b""), "cut within a 200"),
        (b"", "cut"),
        (stream(EVENT, b'data: {"error": {"code": 503, "type": "gone"}}\n\n', DONE), "503 gone event"),
        (stream(EVENT), "status 200, unfinished"),  # its end is that of HTTP: a client might take it for whole
    ],
)
def test_a_client_knows_a_whole_answer_from_any_other(server_says: bytes, kind: str) -> None:
    assert answer_of(server_says).kind == kind


@pytest.mark.parametrize(
    "server_says",
    [
        stream(EVENT),
        plain(BODY.replace(b"whole answer", b"whole answers")),
        stream(EVENT.replace(b"whole", b"while"), end=b""),
        b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n",
        stream(EVENT, b'data: {"error": {"code": 500, "type": "oops"}}\n\n', DONE),
    ],
)
def test_a_wrong_answer_and_a_failure_that_is_not_typed_are_faults(server_says: bytes) -> None:
    tally = Tally()
    tally.enter(QUESTION, answer_of(server_says))
    assert len(tally.faults) == 1
