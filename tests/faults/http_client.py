"""A small HTTP/1.1 client that knows exactly how an answer ended: whole, refused, with an error, or cut off.

Libraries are lenient there, and slow where thousands of events a second are read.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

__all__ = ["Connection", "CutError", "Outcome", "Usage"]

_LONGEST_HEAD = 1 << 16


class CutError(Exception):
    """The connection ended before the answer did."""


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Answer(msgspec.Struct):
    """A completion, an event of one, or an error."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass
class Outcome:
    """How a completion ended.

    Attributes:
        status: of HTTP; None: there was no answer.
        text: all that came.
        num_events: pieces that it came in.
        error: OpenAI's error object, in the body or in an event.
        failure: "refused", "reset" or "cut": what happened to the connection; "unreadable": what came is not JSON.
        done: the stream ended with [DONE], or the body was there whole.
    """

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    num_events: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None
    error: dict[str, Any] | None = None
    failure: str | None = None
    done: bool = False
    left: bool = False

    @property
    def whole(self) -> bool:
        return self.status == 200 and self.done and self.error is None and self.failure is None

    @property
    def kind(self) -> str:
        """What it is called in a list of counts."""
        if self.failure is not None:
            return f"{self.failure} within a {self.status}" if self.status is not None else self.failure
        if self.error is not None:
            return f"{self.error.get('code')} {self.error.get('type')}" + (" event" if self.status == 200 else "")
        return "whole" if self.whole else f"status {self.status}, unfinished"


class Connection:
    """One connection to a server, made when needed and kept while the server keeps it."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def complete(self, body: dict[str, Any], leave_after: int | None = None) -> Outcome:
        """Posts to /v1/completions; never raises for what the server or the network does.

        Args:
            leave_after: the client goes away after so many events.
        """
        outcome = Outcome()
        try:
            await self._exchange(body, outcome, leave_after)
        except ConnectionRefusedError:
            outcome.failure = "refused"
        except (ConnectionError, TimeoutError, OSError):
            outcome.failure = "reset"
        except CutError:
            outcome.failure = "cut"
        except msgspec.DecodeError:
            outcome.failure = "unreadable"
        if outcome.failure is not None or outcome.headers.get("connection") == "close":
            self.close()
        return outcome

    def close(self, abort: bool = False) -> None:
        """``abort``: with a reset, whatever is still to be read."""
        if self._writer is not None:
            if abort:
                self._writer.transport.abort()
            else:
                self._writer.close()
        self._reader = self._writer = None

    async def _exchange(self, body: dict[str, Any], outcome: Outcome, leave_after: int | None) -> None:
        await self._send(body)
        if leave_after == 0:
            self._leave(outcome)
            return
        outcome.status, outcome.headers = await self._read_head()
        pieces: list[str] = []
        try:
            async for data in self._read_data(outcome.headers):
                if data == b"[DONE]":
                    outcome.done = True
                    continue
                _take(_decode(data), outcome, pieces)
                outcome.num_events += 1
                if outcome.num_events == leave_after:
                    self._leave(outcome)
                    return
        finally:
            outcome.text = "".join(pieces)
        if not outcome.headers.get("content-type", "").startswith("text/event-stream"):
            outcome.done = True

    def _leave(self, outcome: Outcome) -> None:
        outcome.left = True
        self.close(abort=outcome.num_events % 2 == 1)

    async def _send(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._address[0]}\r\nContent-Type: application/json\r\n"
        request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data
        if self._reader is not None and self._reader.at_eof():  # the server has closed it meanwhile
            self.close()
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address, limit=_LONGEST_HEAD)
        self._writer.write(request)
        await self._writer.drain()

    async def _read_head(self) -> tuple[int, dict[str, str]]:
        assert self._reader is not None
        with _cut_where_it_ends():
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.strip().split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(status_line.split()[1]), headers

    async def _read_data(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """The data of events as they come; or the whole body at once."""
        assert self._reader is not None
        if headers.get("transfer-encoding") != "chunked":
            with _cut_where_it_ends():
                yield await self._reader.readexactly(int(headers["content-length"]))
            return
        rest = b""
        async for chunk in self._read_chunks():
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    yield event[6:]
        if rest:
            raise CutError

    async def _read_chunks(self) -> AsyncIterator[bytes]:
        assert self._reader is not None
        while True:
            with _cut_where_it_ends():
                size = int(await self._reader.readuntil(b"\r\n"), 16)
                chunk = (await self._reader.readexactly(size + 2))[:-2]
            if size == 0:
                return
            yield chunk


@contextlib.contextmanager
def _cut_where_it_ends() -> Any:
    try:
        yield
    except asyncio.IncompleteReadError:
        raise CutError from None


def _take(answer: _Answer, outcome: Outcome, pieces: list[str]) -> None:
    if answer.error is not None:
        outcome.error = answer.error
    if answer.usage is not None:
        outcome.usage = answer.usage
    for choice in answer.choices:
        pieces.append(choice.text)
        outcome.finish_reason = choice.finish_reason or outcome.finish_reason
