"""The canary of the other tests: content with a server at rest, and not with one that something was left in."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.faults.canary import Canary
from tests.faults.server_process import Server


def test_the_canary_notices_what_is_left(start: Callable[..., Server], make_tiny_llama: Callable[..., Path]) -> None:
    server = start(model=make_tiny_llama(max_position_embeddings=8192)).wait_ready()
    canary = Canary(server, rest_seconds=1)
    canary.check()
    with contextlib.ExitStack() as connections:
        for _ in range(3):
            client = connections.enter_context(httpx.Client(trust_env=False))
            assert client.get(f"{server.url}/health").status_code == 200
        with pytest.raises(AssertionError, match="open files"):
            canary.check()
    with server.stream(max_tokens=8000) as events:
        next(events)
        with pytest.raises(AssertionError, match="requests are left"):
            canary.check()
    with pytest.raises(AssertionError, match="has gained"):
        canary.check(most_gained=-(1 << 40))
    canary.golden[0]["logprobs"]["token_logprobs"][0] += 1e-6
    with pytest.raises(AssertionError):
        canary.check()
