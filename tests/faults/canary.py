"""The canary: after whatever was done to a server, it is what it was before, in every process of it."""

import contextlib
import time
from typing import Any

import httpx
import psutil

from tests.faults.memory import private_bytes
from tests.faults.server_process import Server, wait_until

__all__ = ["Canary"]

_REST_SECONDS = 8.0  # longer than an idle connection is kept
_TIMEOUT = 30.0
_MOST_GAINED = 50 << 20


class Canary:
    """Looks at a server at rest; ``check`` asserts that it is so again.

    Args:
        rest_seconds: how long what was done to it may take to pass.

    Attributes:
        golden: the server's answer to a fixed greedy question, without what is different in every answer.
    """

    def __init__(self, server: Server, rest_seconds: float = _REST_SECONDS) -> None:
        self._server = server
        self._rest_seconds = rest_seconds
        server.look()
        for _ in range(2):  # what is made at the first request, and when its prefix is found, is part of the rest
            self.golden = self._ask()
        self._pids = self._running_pids()
        self._num_fds = {pid: _fewest_fds(psutil.Process(pid)) for pid in self._pids}
        self._memory = {pid: private_bytes(pid) for pid in self._pids}

    def check(self, most_gained: int = _MOST_GAINED) -> None:
        """Asserts health, the golden answer, the same processes, nothing running or held, files and memory as before.

        Args:
            most_gained: bytes that a process may have more than at first.
        """
        server = self._server
        assert self._get("/health") == {"status": "ok"}, server.lines
        assert self._ask() == self.golden
        assert self._running_pids() == self._pids
        assert wait_until(lambda: server.num_unfinished() == 0, self._rest_seconds), "requests are left"
        assert wait_until(lambda: server.metric("kv_cache_usage_perc") == 0, self._rest_seconds), "KV blocks are left"
        for pid in self._pids:
            process = psutil.Process(pid)
            assert wait_until(
                lambda process=process: process.num_fds() <= self._num_fds[process.pid], self._rest_seconds
            ), f"process {pid} had {self._num_fds[pid]} open files and has {_open_files(process)}"
            gained = private_bytes(pid) - self._memory[pid]
            assert gained <= most_gained, f"process {pid} has gained {gained} bytes"
        known = set(server.shared_memory)
        server.look()
        assert server.shared_memory == known, "there is more shared memory than before"

    def _running_pids(self) -> set[int]:
        me = psutil.Process(self._server.process.pid)
        return {me.pid, *(child.pid for child in me.children(recursive=True))}

    def _get(self, path: str) -> Any:
        return httpx.get(self._server.url + path, trust_env=False, timeout=_TIMEOUT).json()

    def _ask(self) -> Any:
        server = self._server
        body = server.body(prompt=[9, 8, 7, 6, 5], max_tokens=8, logprobs=2)
        answer = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False, timeout=_TIMEOUT)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]


def _fewest_fds(process: psutil.Process) -> int:
    """Of a process that may still be closing the last connections."""
    return min(time.sleep(0.05) or process.num_fds() for _ in range(10))


def _open_files(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return sorted([file.path for file in process.open_files()] + [str(c) for c in process.net_connections()])
    return []
