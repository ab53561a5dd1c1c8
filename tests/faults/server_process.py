"""`octavo serve` as a process, seen from outside: its words, its processes, its HTTP, and what it leaves behind."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

__all__ = [
    "NOTICED_SECONDS",
    "START_SECONDS",
    "Server",
    "Stream",
    "blocked_signals",
    "error_in",
    "is_free",
    "is_running",
    "send_request",
    "wait_until",
]

PROMPT = [5, 6, 7, 8]
NOTICED_SECONDS = 5.0
START_SECONDS = 60.0
SERVE = "import sys; from octavo.cli import main; sys.exit(main(['serve', *sys.argv[1:]]))"
_ENGINE = "octavo.engine.core_proc"
_SHARED_MEMORY = "/dev/shm/"


def wait_until(condition: Callable[[], Any], seconds: float = NOTICED_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_running(process: psutil.Process) -> bool:
    """Not ended, and not another one that has got its id."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def blocked_signals(pid: int) -> set[int]:
    """Of SIGTERM and SIGINT, those that the process's first thread holds; what it starts inherits that."""
    words = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    mask = int(words["SigBlk"], 16)
    return {number for number in (signal.SIGTERM, signal.SIGINT) if mask >> (number - 1) & 1}


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class Server:
    """A server process, its engine, and a client.

    Args:
        words: of its command line, after ``serve``.
        port: None: it is to listen elsewhere.
        env: beside this process's environment.
        before: called in the new process before it becomes the server.

    Attributes:
        lines: what it has said on stderr.
        folder: its folder for temporary files.
        processes: all that have been seen, by id.
        engine_pids: of its engines, among them.
        shared_memory: the segments that have been seen in them.
    """

    def __init__(
        self,
        *words: str,
        port: int | None = 0,
        env: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="t-"))
        self.lines: list[str] = []
        settings = {"TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *words, *(() if port is None else ("--port", str(port)))],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | settings | (env or {}),
            preexec_fn=before,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        # No connection is kept, so that each open one is somebody's request.
        self.http = httpx.Client(trust_env=False, timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
        self.processes = {self.process.pid: psutil.Process(self.process.pid)}
        self.shared_memory: set[str] = set()
        self.engine_pids: set[int] = set()
        self._url: str | None = None

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def said(self, text: str) -> str | None:
        return next((line for line in list(self.lines) if text in line), None)

    def wait_said(self, text: str, seconds: float = NOTICED_SECONDS) -> str:
        assert wait_until(lambda: self.said(text) or self.process.poll() is not None, seconds), self.lines
        line = self.said(text)
        assert line is not None, self.lines
        return line

    def wait_ready(self) -> "Server":
        self.wait_said("octavo is loading", START_SECONDS)
        assert wait_until(lambda: self.health().get("status") != "loading", START_SECONDS), self.lines
        assert self.health() == {"status": "ok"}
        assert self.engine_pid
        self.look()
        return self

    # ---- its processes ----------------------------------------------------------------------------------------------

    @property
    def engine_pid(self) -> int:
        """Waits for it to be there."""
        assert self.engine_pids or wait_until(lambda: self.look() or self.engine_pids, START_SECONDS), self.lines
        return min(self.engine_pids)

    def look(self) -> None:
        """Takes note of its processes, and of the shared memory that they use."""
        with contextlib.suppress(psutil.NoSuchProcess):
            me = self.processes[self.process.pid]
            for process in [me, *me.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._note(process)

    def _note(self, process: psutil.Process) -> None:
        if _ENGINE in process.cmdline():
            self.engine_pids.add(process.pid)
        self.processes.setdefault(process.pid, process)
        mapped = {mapping.path for mapping in process.memory_maps()}
        self.shared_memory |= {path for path in mapped if path.startswith(_SHARED_MEMORY)}

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait_exit(self, seconds: float = NOTICED_SECONDS) -> int:
        """The exit code; stderr has been read to its end."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s: {self.lines}") from None
        self._reader.join()
        return code

    def left_nothing(self) -> bool:
        """No process, no files, no shared memory, the port free."""
        return not self.left()

    def left(self) -> list[str]:
        """What is still there of it."""
        found = [f"process {process.pid}" for process in self.running()]
        found += map(str, self.folder.iterdir())
        found += [path for path in self.shared_memory if os.path.exists(path)]
        if self.said("octavo is loading") is not None and not is_free(self.port):
            found.append(f"port {self.port}")
        return found

    def running(self) -> list[psutil.Process]:
        """All processes that were started as part of it and have not ended, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(self.folder) and is_running(process):
                    found.append(process)
        return found

    def close(self) -> None:
        self.http.close()
        for process in self.running():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._reader.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- its HTTP ---------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        if self._url is None:
            self._url = self.wait_said("octavo is loading", START_SECONDS).rsplit(" ", 1)[1]
        return self._url

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"{self.url}/health").json()
        return found

    def body(self, **fields: Any) -> dict[str, Any]:
        model = self.http.get(f"{self.url}/v1/models").json()["data"][0]["id"]
        return {"model": model, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 4} | fields

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post(f"{self.url}/v1/completions", json=self.body(**fields))

    @contextlib.contextmanager
    def stream(self, **fields: Any) -> Iterator["Stream"]:
        """A streamed completion that has been asked for; nothing of it may be there yet."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            body = json.dumps(self.body(stream=True, **fields))
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            yield Stream(connection)

    def metric(self, name: str) -> float:
        """A series' value; where it has several, their sum."""
        scrape = self.http.get(f"{self.url}/metrics").text
        found = [line for line in scrape.splitlines() if line.startswith(f"vllm:{name}{{")]
        assert found, f"no vllm:{name} in {scrape}"
        return sum(float(line.split()[-1]) for line in found)

    def metric_by(self, name: str, label: str) -> dict[str, float]:
        """A series' values by one of its labels; what differs in other labels is added up."""
        values: dict[str, float] = {}
        for line in self.http.get(f"{self.url}/metrics").text.splitlines():
            found = re.match(rf'vllm:{name}\{{.*{label}="([^"]*)".*\}} (\S+)', line)
            if found is not None:
                values[found[1]] = values.get(found[1], 0.0) + float(found[2])
        return values

    def num_unfinished(self) -> float:
        return self.metric("num_requests_running") + self.metric("num_requests_waiting")


class Stream:
    """The data of a stream's events, one by one; what is not there yet is waited for."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._response: http.client.HTTPResponse | None = None
        self._last = ""

    @property
    def response(self) -> http.client.HTTPResponse:
        """Begins with the first event, or tells why there is none."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> str:
        assert self.response.status == 200
        while line := self.response.readline():
            if line != b"\n":
                self._last = line.decode().removeprefix("data: ").rstrip("\n")
                return self._last
        if self._last != "[DONE]":  # the library takes every end for a good one
            raise http.client.IncompleteRead(b"")
        raise StopIteration


def error_in(stream: Stream) -> dict[str, Any]:
    """The error that ends a stream, which must be followed by [DONE] and nothing else; or that is there instead."""
    if stream.response.status != 200:
        error = stream.response.read().decode()
    else:
        *_, error, done = list(stream)
        assert done == "[DONE]"
    found: dict[str, Any] = json.loads(error)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert stream.response.status in (200, found["code"])
    return found


def send_request(client: socket.socket, body: dict[str, Any]) -> None:
    """Of a completion, without reading anything."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    client.sendall(head.encode() + b"\r\n\r\n" + data)
