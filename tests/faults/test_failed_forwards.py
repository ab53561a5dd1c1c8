"""A forward that fails or computes NaN, in the replayed steps of a real server: that batch ends with an error, and the
engine recovers or ends. Never a wrong text, and nothing of it in the prefix cache."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.canary import Canary
from tests.faults.planted import planted
from tests.faults.server_process import Server, error_in

PROMPT = list(range(40, 90))  # three full blocks, and a rest


@pytest.mark.parametrize("overlap", [False, True])
def test_a_forward_that_fails_ends_its_batch_with_an_error_and_the_server(
    start: Callable[..., Server], tmp_path: Path, overlap: bool
) -> None:
    flags = ["--async-scheduling"] if overlap else []
    server = start(*flags, env=planted(tmp_path, "raise 12")).wait_ready()
    assert server.complete(max_tokens=8).status_code == 200
    with server.stream(max_tokens=50) as events:
        error = error_in(events)
    assert (error["code"], error["type"]) == (503, "Service Unavailable")
    assert "planted" not in error["message"]
    assert server.wait_exit() == 3
    assert server.lines[-1] == "octavo: error: RuntimeError: planted: the device is on fire"
    assert server.left_nothing()


FLAGS = ("--max-num-batched-tokens", "40")  # the prompt takes two steps


@pytest.fixture(scope="module")
def right(tiny_llama_dir: Path) -> Any:
    """What a server without a fault answers."""
    with contextlib.closing(Server(str(tiny_llama_dir), *FLAGS)) as server:
        return server.wait_ready().complete(prompt=PROMPT, max_tokens=8).json()["choices"]


@pytest.mark.parametrize("fault", ["nan 3", "nan-kv 3", "nan-kv 1", "nan-kv 2"])
def test_nan_ends_its_request_with_an_error_and_the_next_answer_is_right(
    start: Callable[..., Server], tmp_path: Path, right: Any, fault: str
) -> None:
    server = start(*FLAGS, env=planted(tmp_path, fault)).wait_ready()
    failed = server.complete(prompt=PROMPT, max_tokens=8)
    assert failed.status_code == 500, failed.text
    assert failed.json()["error"]["type"] == "InternalServerError"
    assert "NaN" in failed.json()["error"]["message"]
    assert server.said("step replay: FULL") is not None
    again = server.complete(prompt=PROMPT, max_tokens=8)
    assert again.status_code == 200, again.text
    assert again.json()["choices"] == right
    Canary(server).check()
