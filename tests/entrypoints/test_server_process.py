"""`octavo serve` as a process: how it starts, drains and ends, and what is left when something is killed."""

import http.client
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.server_process import (
    START_SECONDS,
    Server,
    Stream,
    blocked_signals,
    error_in,
    is_running,
    send_request,
    wait_until,
)

LENGTH = 8192


@pytest.fixture(scope="module")
def long_llama_dir(make_tiny_llama: Callable[..., Path]) -> Path:
    """Long enough that a request is under way when something happens to it."""
    return make_tiny_llama(max_position_embeddings=LENGTH)


@pytest.fixture
def start(long_llama_dir: Path) -> Iterator[Callable[..., Server]]:
    """``start(*flags, model=…, port=0)`` → Server, not ready yet."""
    servers: list[Server] = []

    def start_one(*words: str, model: Path | str = long_llama_dir, port: int = 0) -> Server:
        servers.append(Server(str(model), *words, port=port))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def shared(long_llama_dir: Path) -> Iterator[Server]:
    server = Server(str(long_llama_dir), "--served-model-name", "tiny")
    yield server.wait_ready()
    server.close()


def in_prefill(server: Server, events: Stream) -> None:
    """One token a step and a prompt of thousands: when the engine has it, it is in prefill for seconds."""
    assert wait_until(lambda: server.metric("num_requests_running") == 1)
    assert server.metric("generation_tokens_total") == 0


def in_stream(server: Server, events: Stream) -> None:
    for _ in range(3):
        assert json.loads(next(events))["choices"][0]["finish_reason"] is None


LONG_PROMPT = {"prompt": [5] * (LENGTH - 10), "max_tokens": 4}
LONG_ANSWER = {"max_tokens": LENGTH - 10}
UNDER_WAY = pytest.mark.parametrize(
    ("request_fields", "reach"), [(LONG_PROMPT, in_prefill), (LONG_ANSWER, in_stream)], ids=["prefill", "mid-stream"]
)
ONE_TOKEN_A_STEP = ("--max-num-batched-tokens", "1")
KILLED = "octavo: error: engine core process was killed by signal 9 (SIGKILL)"


# ---- a server at work -----------------------------------------------------------------------------------------------


def test_ready_line_says_where_the_server_is_and_what_it_can_hold(shared: Server) -> None:
    line = shared.wait_said("Octavo is ready")
    assert f"{shared.url} (model tiny, max_model_len {LENGTH}, KV cache " in line
    assert int(line.split("KV cache ")[1].split()[0]) >= LENGTH


def test_front_end_does_not_load_torch(shared: Server) -> None:
    def has_torch(pid: int) -> bool:
        return any("libtorch" in mapping.path for mapping in psutil.Process(pid).memory_maps())

    assert not has_torch(shared.process.pid)
    assert has_torch(shared.engine_pid)  # the control


def test_a_server_that_is_ready_holds_no_signal(shared: Server) -> None:
    assert blocked_signals(shared.process.pid) == set()


def test_client_that_goes_away_frees_its_streamed_request(shared: Server) -> None:
    with shared.stream(**LONG_ANSWER) as events:
        next(events)
        assert shared.num_unfinished() == 1
    assert wait_until(lambda: shared.num_unfinished() == 0, seconds=1)


def test_client_that_goes_away_frees_its_request_that_is_not_streamed(shared: Server) -> None:
    with socket.create_connection(("127.0.0.1", shared.port)) as client:
        send_request(client, shared.body(**LONG_ANSWER))
        assert wait_until(lambda: shared.num_unfinished() == 1)
    assert wait_until(lambda: shared.num_unfinished() == 0, seconds=1)


# ---- starts that fail -----------------------------------------------------------------------------------------------


def test_port_in_use_ends_the_start_before_the_model_is_looked_at(start: Callable[..., Server]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(model="/no/such/model", port=port)
        assert server.wait_exit(START_SECONDS) == 1
    (line,) = server.lines
    assert line.startswith(f"octavo: error: port {port} on 127.0.0.1 is in use")
    assert "--port" in line


def test_every_line_of_both_processes_may_be_json(start: Callable[..., Server]) -> None:
    server = start("--log-format", "json")
    ready = json.loads(server.wait_said("Octavo is ready", START_SECONDS))
    url = ready["message"].split()[3]
    assert server.http.get(f"{url}/health", headers={"x-request-id": "mine"}).status_code == 200
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    said = [json.loads(line) for line in server.lines]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in said)
    assert next(line for line in said if line["logger"] == "octavo.access")["request_id"] == "mine"
    assert {line["logger"].split(".")[1] for line in said if "." in line["logger"]} >= {"access", "worker"}


def test_host_that_is_not_of_this_machine_is_named(start: Callable[..., Server]) -> None:
    server = start("--host", "192.0.2.1")
    assert server.wait_exit(START_SECONDS) == 1
    (line,) = server.lines
    assert line.startswith("octavo: error: cannot listen on 192.0.2.1")


def test_chat_template_that_cannot_be_read_is_named(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start("--chat-template", str(tmp_path / "none.jinja"))
    assert server.wait_exit(START_SECONDS) == 1
    (line,) = server.lines
    assert line == f"octavo: error: --chat-template {tmp_path / 'none.jinja'} cannot be read: No such file or directory"


def test_chat_template_that_is_not_valid_ends_the_start_before_the_weights_are_read(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for %}")
    server = start("--chat-template", str(template))
    assert server.wait_exit(START_SECONDS) == 1
    assert server.lines[-1].startswith("octavo: error: --chat-template: the chat template is not valid (line 1)")
    assert server.said("octavo.loader") is None
    assert server.left_nothing()


def test_model_that_is_not_there_is_named_in_the_last_line(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(model=tmp_path / "none")
    assert server.wait_exit(START_SECONDS) == 1
    assert server.lines[-1].startswith("octavo: error: ")
    assert str(tmp_path / "none") in server.lines[-1]
    assert not [
        word for word in ("Started", "Finished", "ready") if server.said(word)
    ]  # nothing that reads like success
    assert server.left_nothing()


def test_truncated_weights_are_named_with_file_and_tensor(
    start: Callable[..., Server], make_tiny_llama: Callable[..., Path]
) -> None:
    folder = make_tiny_llama()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    server = start(model=folder)
    assert server.wait_exit(START_SECONDS) == 1
    assert server.lines[-1].startswith(f"octavo: error: {weights}: ")
    assert "tensor 'model." in server.lines[-1]
    assert server.left_nothing()


def test_length_that_the_model_does_not_have_is_refused_by_flag(start: Callable[..., Server]) -> None:
    server = start("--max-model-len", str(LENGTH + 1))
    assert server.wait_exit(START_SECONDS) == 2
    assert server.lines[-1].startswith(f"octavo: error: --max-model-len {LENGTH + 1} is more than")


def test_length_that_does_not_fit_is_refused_with_the_length_that_would(start: Callable[..., Server]) -> None:
    server = start("--max-model-len", "100", "--num-gpu-blocks-override", "2")
    assert server.wait_exit(START_SECONDS) == 1
    assert server.lines[-1].startswith("octavo: error: --max-model-len 100 ")
    assert "32" in server.lines[-1]
    assert server.said("octavo.loader") is not None  # the control of the test above: this one was found late
    assert server.left_nothing()


# ---- the engine is killed -------------------------------------------------------------------------------------------


def test_engine_killed_while_idle_ends_the_server(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    os.kill(server.engine_pid, signal.SIGKILL)
    assert server.wait_exit() == 3
    assert server.lines[-1] == KILLED
    assert server.left_nothing()


def test_engine_killed_while_loading_ends_the_server(start: Callable[..., Server]) -> None:
    server = start()
    assert server.engine_pid
    assert server.health()["status"] == "loading"
    os.kill(server.engine_pid, signal.SIGKILL)
    assert server.wait_exit() == 3
    assert server.lines[-1] == KILLED
    assert server.left_nothing()


@UNDER_WAY
def test_engine_killed_at_work_ends_streams_with_an_error_and_the_server(
    start: Callable[..., Server], request_fields: dict[str, Any], reach: Callable[[Server, Stream], None]
) -> None:
    server = start(*ONE_TOKEN_A_STEP).wait_ready()
    with server.stream(**request_fields) as events:
        reach(server, events)
        os.kill(server.engine_pid, signal.SIGKILL)
        error = error_in(events)
    assert (error["code"], error["type"]) == (503, "Service Unavailable")
    assert "engine has died" in error["message"]
    assert server.wait_exit() == 3
    assert server.lines[-1] == KILLED
    assert server.left_nothing()


def test_engine_killed_while_draining_is_no_clean_end(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    with server.stream(**LONG_ANSWER) as events:
        next(events)
        server.signal(signal.SIGTERM)
        server.wait_said("waiting up to 30 s")
        os.kill(server.engine_pid, signal.SIGKILL)
        assert "engine has died" in error_in(events)["message"]
    assert server.wait_exit() == 3
    assert server.lines[-1] == KILLED
    assert server.left_nothing()


# ---- the server is killed -------------------------------------------------------------------------------------------


def test_server_killed_while_loading_leaves_nothing(start: Callable[..., Server]) -> None:
    server = start()
    assert server.engine_pid
    assert server.health()["status"] == "loading"
    assert not server.left_nothing()
    server.signal(signal.SIGKILL)
    assert wait_until(server.left_nothing)


def test_server_killed_while_idle_leaves_nothing_and_its_port_can_be_had_at_once(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    answer = server.complete().json()["choices"]
    server.signal(signal.SIGKILL)
    server.wait_exit()
    again = start(port=server.port).wait_ready()
    assert again.complete().json()["choices"] == answer
    engine = server.processes[server.engine_pid]
    assert wait_until(lambda: not is_running(engine))
    assert list(server.folder.iterdir()) == []


@UNDER_WAY
def test_server_killed_at_work_leaves_nothing(
    start: Callable[..., Server], request_fields: dict[str, Any], reach: Callable[[Server, Stream], None]
) -> None:
    server = start(*ONE_TOKEN_A_STEP).wait_ready()
    with server.stream(**request_fields) as events:
        reach(server, events)
        server.signal(signal.SIGKILL)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            list(events)
    assert wait_until(server.left_nothing)


# ---- the server is told to end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_idle_is_a_clean_end(start: Callable[..., Server], signum: int) -> None:
    server = start().wait_ready()
    server.signal(signum)
    assert server.wait_exit() == 0
    assert server.said("octavo: error") is None
    assert server.left_nothing()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_loading_gives_the_exit_code_of_the_signal(start: Callable[..., Server], signum: int) -> None:
    server = start()
    assert server.engine_pid
    assert server.health()["status"] == "loading"
    server.signal(signum)
    assert server.wait_exit() == 128 + signum
    assert "Traceback" not in "".join(server.lines)
    assert server.left_nothing()


def test_running_requests_finish_after_sigterm_and_new_ones_are_refused(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    count = 800
    refused = server.body()
    with server.stream(max_tokens=count) as events:
        tokens = [next(events)]
        server.signal(signal.SIGTERM)
        server.wait_said("waiting up to 30 s for 1 running request")
        assert server.health() == {"status": "draining"}
        answer = server.http.post(f"{server.url}/v1/completions", json=refused)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "Service Unavailable")
        assert server.process.poll() is None
        tokens += events
    assert tokens.pop() == "[DONE]"
    assert json.loads(tokens[-1])["choices"][0]["finish_reason"] == "length"
    assert server.wait_exit() == 0
    assert server.left_nothing()


def test_without_time_to_finish_requests_end_with_a_typed_error(start: Callable[..., Server]) -> None:
    server = start("--shutdown-timeout", "0").wait_ready()
    with server.stream(**LONG_ANSWER) as events:
        next(events)
        server.signal(signal.SIGTERM)
        error = error_in(events)
    assert (error["code"], error["type"]) == (503, "Service Unavailable")
    assert "shutting down" in error["message"]
    assert server.wait_exit() == 0
    assert server.left_nothing()


def test_second_signal_ends_the_wait(start: Callable[..., Server]) -> None:
    server = start("--shutdown-timeout", "600").wait_ready()
    with server.stream(**LONG_ANSWER) as events:
        next(events)
        server.signal(signal.SIGTERM)
        server.wait_said("waiting up to 600 s")
        next(events)
        server.signal(signal.SIGTERM)
        assert "shutting down" in error_in(events)["message"]
    assert server.wait_exit() == 0
    assert server.left_nothing()


def test_client_that_does_not_read_does_not_hold_up_the_end(start: Callable[..., Server]) -> None:
    server = start("--shutdown-timeout", "0").wait_ready()
    num_choices, max_tokens = 16, 400
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        large = {"logprobs": 20, "stream": True, "temperature": 1, "seed": 1}
        send_request(client, server.body(n=num_choices, max_tokens=max_tokens, **large))
        assert wait_until(lambda: server.metric("generation_tokens_total") == num_choices * max_tokens, seconds=30)
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
    assert server.said("Waiting for connections to close") is not None  # the control: it did not fit into buffers
    assert "Traceback" not in "".join(server.lines)
    assert server.left_nothing()
