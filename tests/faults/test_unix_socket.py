"""A server on a Unix socket: what clients see of it, and that it is gone with the server, however that ends."""

import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.faults.server_process import START_SECONDS, Server, wait_until


def test_its_socket_is_gone_whatever_ends_it_and_a_restart_works_at_once(
    start: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    path = Path("octavo.sock")

    def serve() -> Server:
        return start("--uds", str(path), port=None)

    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://octavo", timeout=30) as client:
        server = serve()
        server.wait_said(f"Octavo is ready: unix:{path}", START_SECONDS)
        answer = client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 3})
        assert answer.status_code == 200
        second = serve()
        assert second.wait_exit(START_SECONDS) == 1
        assert second.said(f"--uds {path} is in use; stop what uses it, or choose another path")
        assert client.get("/health").status_code == 200
        server.look()
        server.signal(signal.SIGKILL)
        assert wait_until(lambda: not path.exists())

        restarted = serve()
        restarted.wait_said("octavo is loading", START_SECONDS)
        assert client.get("/health").status_code == 503
        restarted.signal(signal.SIGTERM)
        assert restarted.wait_exit() == 128 + signal.SIGTERM
        assert not path.exists()
