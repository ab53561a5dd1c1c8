"""The canary of the other tests: content with a server at rest, and not with one that something was left in."""

import contextlib
import os
import signal
from collections.abc import Callable

import httpx
import pytest

from tests.faults.canary import Canary
from tests.faults.server_process import Server


def test_the_canary_notices_what_is_left(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    canary = Canary(server, rest_seconds=2)
    canary.check()
    with contextlib.ExitStack() as connections:
        for _ in range(3):
            client = connections.enter_context(httpx.Client(trust_env=False))
            assert client.get(f"{server.url}/health").status_code == 200
        with pytest.raises(AssertionError, match="open files"):
            canary.check()
    with server.stream(max_tokens=500) as events:
        next(events)
        os.kill(server.engine_pid, signal.SIGSTOP)  # or it would be done before the canary has waited long enough
        with pytest.raises((AssertionError, httpx.TimeoutException)):
            canary.check()
        os.kill(server.engine_pid, signal.SIGCONT)
    with pytest.raises(AssertionError, match="has gained"):
        canary.check(most_gained=-(1 << 40))
    canary.golden[0]["logprobs"]["token_logprobs"][0] += 1e-6
    with pytest.raises(AssertionError):
        canary.check()
