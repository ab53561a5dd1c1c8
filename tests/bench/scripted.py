"""A server that answers as it is told, byte by byte, in this process."""

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Callable
from typing import Any

Script = Callable[[int, dict[str, Any]], list[Any]]


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str = "a", **choice: Any) -> bytes:
    return chunk(choices=[{"index": 0, "text": text, "finish_reason": None} | choice])


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return chunk(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(body: dict[str, Any], tokens: int | None = None) -> list[Any]:
    """A sound answer: as many tokens as were asked for, in as many chunks."""
    count = body["max_tokens"] if tokens is None else tokens
    return [STREAM, *[token()] * count, usage(len(body["prompt"]), count), DONE, "end"]


def refusal(status: int, body: Any) -> list[Any]:
    data = json.dumps(body).encode()
    return [b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data]


class ScriptedServer:
    """``script(number, body)`` gives what is sent in answer to each request: bytes (the part of a stream after its head
    as chunks of HTTP), a number (seconds to wait), "end" (of the stream), "cut" (the connection).

    Attributes:
        requests: (path, headers, body) of each.
        connections: that were made.
        most: requests under way at once.
    """

    def __init__(self, script: Script, tls: ssl.SSLContext | None = None) -> None:
        self.script = script
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.connections = 0
        self.most = self._now = 0
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls))
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http{'' if tls is None else 's'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await self._answer(reader, writer):
                pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if head[0].startswith("GET"):
            models = json.dumps({"data": [{"id": "served", "root": "no/root"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(models) + models)
            return True
        number, asked = len(self.requests), json.loads(body)
        self.requests.append((head[0].split()[1], headers, asked))
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            return await self._send(self.script(number, asked), writer)
        finally:
            self._now -= 1

    async def _send(self, items: list[Any], writer: asyncio.StreamWriter) -> bool:
        in_stream = False
        for item in items:
            if item == "cut":
                return False
            if isinstance(item, int | float):
                await asyncio.sleep(item)
                continue
            data = b"" if item == "end" else item
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if in_stream else data)
            await writer.drain()
            in_stream = in_stream or item == STREAM
        return True
