"""A small HTTP server that answers as it is told; the command in this process, as a process, and at a terminal."""

import contextlib
import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from octavo.config import EngineArgs, ServerConfig

OCTAVO = [sys.executable, "-c", "import sys; from octavo.cli import main; sys.exit(main())"]


class FakeServer:
    """An OpenAI-compatible server with scripted answers.

    Attributes:
        events: the data of the events that a generation's stream consists of; an Event among them is waited for.
        error: (status, message): the answer to everything, instead.
        requests: (path, body) of each generation asked for.
        keys: the Authorization header of each.
        gone: set when a client has closed its stream before the end.
    """

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.error: tuple[int, str] | None = None
        self.raw: bytes | None = None
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.gone = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def answer(self, *pieces: Any, reasoning: str | None = None, finish_reason: str = "stop") -> None:
        """The next answers of a chat are these pieces."""
        thoughts = [] if reasoning is None else [{"delta": {"reasoning": reasoning, "reasoning_content": reasoning}}]
        texts = [piece if isinstance(piece, threading.Event) else {"delta": {"content": piece}} for piece in pieces]
        self._script([{"delta": {"role": "assistant", "content": ""}}, *thoughts, *texts], {"delta": {}}, finish_reason)

    def completion(self, *pieces: str, finish_reason: str = "stop") -> None:
        self._script([{"text": piece} for piece in pieces], {"text": ""}, finish_reason)

    def _script(self, choices: list[Any], last: dict[str, Any], finish_reason: str) -> None:
        choices = [*choices, last | {"finish_reason": finish_reason}]
        chunks = [choice if isinstance(choice, threading.Event) else {"choices": [choice]} for choice in choices]
        self.events = [*chunks, {"choices": [], "usage": {}}, "[DONE]"]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _handler(fake) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._reply(200, {"data": [{"id": "fake-model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append((self.path, body))
                fake.keys.append(self.headers.get("Authorization"))
                if fake.error is not None:
                    return self._reply(200, {})
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                with contextlib.suppress(OSError):
                    return self._send_events(list(fake.events))
                return fake.gone.set()

            def _send_events(self, events: list[Any]) -> None:
                for event in events:
                    if isinstance(event, threading.Event):
                        while not event.wait(0.02):
                            self.wfile.write(b": still there\n\n")  # fails when the client has gone
                        continue
                    text = event if isinstance(event, str) else json.dumps(event)
                    self.wfile.write(f"data: {text}\n\n".encode())

            def _reply(self, status: int, body: Any) -> None:
                if fake.error is not None:
                    status, body = fake.error[0], {"error": {"message": fake.error[1], "code": fake.error[0]}}
                data = json.dumps(body).encode() if fake.raw is None else fake.raw
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        return Handler


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


class Finished:
    """What a command did in this process."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def octavo(capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """``octavo(*words)`` → Finished; runs the command in this process."""
    from octavo.cli import main

    def run(*words: str) -> Finished:
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        return Finished(code, *capsys.readouterr())

    return run


@pytest.fixture
def spawn() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """``spawn(*words)`` → the command as a process, with pipes."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen([*OCTAVO, *words], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


class Terminal:
    """The command at a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "dumb"}
        self._process = subprocess.Popen(
            [*OCTAVO, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self._shown = b""

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def expect(self, text: str, seconds: float = 20.0) -> None:
        """Waits for ``text``; what is on the screen up to its end is forgotten."""
        assert self._appears(text, seconds), f"no {text!r} in {self._shown!r}"

    def press_until(self, key: str, text: str) -> None:
        """As a person does: Python misses a Ctrl-C that comes just before it begins to wait for a key."""
        for _ in range(20):
            self.type(key)
            if self._appears(text, seconds=1.0):
                return
        self.expect(text, seconds=0.0)

    def _appears(self, text: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while text.encode() not in self._shown:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            try:
                more = os.read(self._ours, 4096) if ready else b""
            except OSError:  # the command has ended
                more = b""
            if not more:
                return False
            self._shown += more
        self._shown = self._shown.partition(text.encode())[2]
        return True

    def wait_exit(self) -> int:
        return self._process.wait(20.0)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """``terminal(*words)`` → Terminal."""
    opened: list[Terminal] = []

    def run(*words: str) -> Terminal:
        opened.append(Terminal(*words))
        return opened[-1]

    yield run
    for each in opened:
        each.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineArgs, ServerConfig]]:
    """What would have been served."""
    calls: list[tuple[EngineArgs, ServerConfig]] = []

    def serve(engine_args: EngineArgs, config: ServerConfig, socket_dir: object) -> int:
        calls.append((engine_args, config))
        return 0

    monkeypatch.setattr("octavo.entrypoints.serve", serve)
    return calls
