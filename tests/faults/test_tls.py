"""`octavo serve` with a certificate: what it says, and that every front end speaks HTTPS."""

import signal
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import trustme

from tests.faults.server_process import START_SECONDS, Server
from tests.faults.test_front_ends import MANY, further


def test_every_front_end_speaks_https_and_the_log_says_so(start: Callable[..., Server], tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, ca = tmp_path / "both.pem", tmp_path / "ca.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    authority.cert_pem.write_to_path(str(ca))
    server = start("--ssl-certfile", str(certificate), "--api-server-count", "2")
    server.wait_said("Octavo is ready: https://127.0.0.1:", START_SECONDS)
    assert server.url.startswith("https://")
    further(server)
    context = ssl.create_default_context(cafile=str(ca))
    for _ in range(MANY):  # each by a connection of its own
        assert httpx.get(f"{server.url}/health", verify=context, trust_env=False, timeout=30).status_code == 200
    server.look()
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert server.left_nothing()
