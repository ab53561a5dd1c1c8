"""The real HTTP server over any app, in a thread of the tests, and clients that write and read bytes."""

import asyncio
import socket
import threading
import time
from typing import Any

import uvloop

from octavo.config import AccessConfig, HttpConfig, LimitsConfig, LogsConfig, ServerConfig
from octavo.entrypoints import HttpServer

__all__ = ["WireServer", "head", "receive_all"]


class _Loop(uvloop.Loop):
    """Its clock can be put forward, by ``ahead`` seconds."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


class WireServer:
    """Serves ``app`` on a port of this machine, or on ``sock``.

    Attributes:
        num_connections: those that are open now.
        refused: the statuses of the connections that it has closed.
        unsent: bytes that wait in this process for the client that reads least.
    """

    def __init__(
        self,
        app: Any,
        logs: LogsConfig | None = None,
        http: HttpConfig | None = None,
        sock: socket.socket | None = None,
        access: AccessConfig | None = None,
        **limits: Any,
    ) -> None:
        config = ServerConfig(
            http=http or HttpConfig(),
            access=access or AccessConfig(),
            limits=LimitsConfig(**limits),
            logs=logs or LogsConfig(),
        )
        self._socket = sock or socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.address = self._socket.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.refused: list[int] = []
        self._http = HttpServer(app, config, self.refused.append)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._http.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _run(self) -> None:
        self._loop = _Loop()
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._http.serve(sockets=[self._socket]))

    def after(self, seconds: float) -> None:
        """Lets so many seconds pass by the server's clock, and has it look then at what takes too long."""
        looked = threading.Event()

        def look() -> None:
            self._loop.ahead += seconds
            self._http.sweep()
            looked.set()

        self._loop.call_soon_threadsafe(look)
        assert looked.wait(20)

    @property
    def num_connections(self) -> int:
        return len(self._http.server_state.connections)

    @property
    def unsent(self) -> int:
        connections = list(self._http.server_state.connections)
        return max((one.transport.get_write_buffer_size() for one in connections), default=0)

    def option(self, level: int, name: int) -> set[int]:
        """An option of the server's end of each connection."""
        connections = list(self._http.server_state.connections)
        return {one.transport.get_extra_info("socket").getsockopt(level, name) for one in connections}

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        client = socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(20)
        client.connect(self.address)
        return client

    def talk(self, *parts: bytes) -> bytes:
        """Sends the parts; all that is answered until the server closes the connection."""
        with self.connect() as client:
            for part in parts:
                client.sendall(part)
            return receive_all(client)

    def stop(self) -> None:
        self._http.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


def receive_all(client: socket.socket) -> bytes:
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def head(method: str, path: str, *lines: str) -> bytes:
    """A request's head."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: server", *lines, "", ""]).encode()
