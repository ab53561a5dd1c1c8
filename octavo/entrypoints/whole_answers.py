"""Head and body of an answer whose length is known as one write: whoever ends this process, at whatever moment, leaves
no client with a head alone. They are one packet, too."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = ["WholeAnswers"]


class WholeAnswers(asyncio.Transport):
    """What ``cycle`` writes to until it has begun to answer: keeps the head back until the first part of the body."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        super().__init__()
        self._cycle = cycle
        self._transport = cycle.transport
        self._head: Any = b""

    def write(self, data: Any) -> None:
        cycle = self._cycle
        if not cycle.response_started:  # it asks for the request's body
            self._transport.write(data)
        elif not self._head and cycle.chunked_encoding is False and cycle.scope["method"] != "HEAD":
            self._head = data
        else:
            cycle.transport = self._transport
            self._transport.writelines((self._head, data))

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()
