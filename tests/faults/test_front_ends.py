"""Several front ends of one engine: they share its work, its port and its fate."""

import contextlib
import http.client
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.faults.server_process import NOTICED_SECONDS, START_SECONDS, Server, Stream, error_in, wait_until

LENGTH = 8192
# Connections are spread by chance: that one of two front ends gets none of so many happens once in 2^23 times.
MANY = 24


@pytest.fixture
def two(start: Callable[..., Server], make_tiny_llama: Callable[..., Path]) -> Server:
    model = make_tiny_llama(max_position_embeddings=2 * LENGTH)
    words = ("--api-server-count", "2", "--max-num-seqs", "64", "--num-gpu-blocks-override", "16384")
    server = start(*words, model=model).wait_ready()
    further(server)
    return server


def further(server: Server) -> psutil.Process:
    """The second front end; returns when it takes connections."""

    def found() -> list[psutil.Process]:
        server.look()
        return [p for p in server.processes.values() if "octavo.entrypoints.front_end_proc" in p.cmdline()]

    def listens() -> bool:
        return any(c.status == psutil.CONN_LISTEN for p in found() for c in p.net_connections("tcp"))

    assert wait_until(listens, START_SECONDS), server.lines
    return found()[0]


def shares(server: Server) -> tuple[int, int]:
    """How many clients are connected to the first and to the second front end."""

    def num_clients(pid: int) -> int:
        connections = psutil.Process(pid).net_connections("tcp")
        return sum(c.status == psutil.CONN_ESTABLISHED and c.laddr.port == server.port for c in connections)

    return num_clients(server.process.pid), num_clients(further(server).pid)


@contextlib.contextmanager
def many_streams(server: Server, **fields: object):
    with contextlib.ExitStack() as stack:
        streams: list[Stream] = [stack.enter_context(server.stream(**fields)) for _ in range(MANY)]
        for stream in streams:
            next(stream)
        assert min(shares(server)) > 0
        yield streams


def test_both_serve_and_requests_of_one_id_do_not_meet(two: Server) -> None:
    body = two.body(max_tokens=32, request_id="the-same")
    alone = two.http.post(f"{two.url}/v1/completions", json=body).json()["choices"][0]["text"]

    def ask(_: int) -> tuple[int, str]:
        answer = two.http.post(f"{two.url}/v1/completions", json=body)
        return answer.status_code, answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(MANY) as threads:
        assert set(threads.map(ask, range(MANY))) == {(200, alone)}
    assert wait_until(lambda: two.num_unfinished() == 0)


def test_a_killed_front_end_is_the_end_of_the_server(two: Server) -> None:
    with many_streams(two, max_tokens=LENGTH):
        further(two).kill()
        assert two.wait_exit() == 3
    assert two.lines[-1] == "octavo: error: front end 1 process was killed by signal 9 (SIGKILL)"
    assert wait_until(two.left_nothing)


def end_of(stream: Stream) -> int | None:
    """The code of the error that ended it; None: it was cut off."""
    try:
        code: int = error_in(stream)["code"]
    except (ConnectionError, http.client.HTTPException):
        return None
    return code


def test_a_killed_first_process_takes_all_along_and_the_clients_of_the_other_are_told(two: Server) -> None:
    with many_streams(two, max_tokens=LENGTH) as streams, ThreadPoolExecutor(MANY) as threads:
        of_first, of_other = shares(two)
        reading = threads.map(end_of, streams)  # all the time: who does not read cannot be told
        two.signal(signal.SIGKILL)
        two.wait_exit()
        ends = list(reading)
    assert (ends.count(None), ends.count(503)) == (of_first, of_other)  # the first one's clients are the control
    assert wait_until(two.left_nothing)


def test_the_other_front_end_answers_what_is_not_streamed_with_an_error_too(two: Server) -> None:
    body = two.body(max_tokens=LENGTH)

    def ask(_: int) -> int | None:
        try:
            answer = two.http.post(f"{two.url}/v1/completions", json=body)
        except httpx.TransportError:
            return None
        assert answer.json()["error"]["message"] == "the engine has died; the server is going down"
        return answer.status_code

    with ThreadPoolExecutor(MANY) as threads:
        answers = threads.map(ask, range(MANY))
        assert wait_until(lambda: sum(shares(two)) >= MANY and two.metric("num_requests_running") == MANY)
        of_first, of_other = shares(two)
        two.signal(signal.SIGKILL)
        codes = list(answers)
    assert (codes.count(None), codes.count(503)) == (of_first, of_other)
    two.wait_exit()
    assert wait_until(two.left_nothing)


def test_a_killed_engine_is_told_to_the_clients_of_both(two: Server) -> None:
    with many_streams(two, max_tokens=LENGTH) as streams:
        psutil.Process(two.engine_pid).kill()
        assert [error_in(stream)["code"] for stream in streams] == [503] * MANY
    assert two.wait_exit() == 3
    assert two.lines[-1] == "octavo: error: engine core process was killed by signal 9 (SIGKILL)"
    assert wait_until(two.left_nothing)


def test_requests_of_both_finish_after_sigterm(two: Server) -> None:
    with many_streams(two, max_tokens=200) as streams:
        two.signal(signal.SIGTERM)
        assert [list(stream)[-1] for stream in streams] == ["[DONE]"] * MANY
    assert two.wait_exit() == 0
    assert wait_until(two.left_nothing)


def test_no_connection_waits_for_a_front_end_that_has_drained_before_the_other(two: Server) -> None:
    other = further(two)
    with contextlib.ExitStack() as stack:
        while True:
            stream = stack.enter_context(two.stream(max_tokens=LENGTH))
            next(stream)
            if shares(two)[1] == 0:
                break
            stack.pop_all().close()  # it was the other's
            assert wait_until(lambda: shares(two)[1] == 0)
        two.signal(signal.SIGTERM)
        other.wait(NOTICED_SECONDS)
        for _ in range(MANY):
            with httpx.Client(trust_env=False, timeout=2) as client:
                assert client.get(f"{two.url}/health").json() == {"status": "draining"}
        two.signal(signal.SIGTERM)
        assert two.wait_exit() == 0


def test_a_second_signal_ends_the_wait_of_both(two: Server) -> None:
    with many_streams(two, max_tokens=LENGTH) as streams:
        two.signal(signal.SIGTERM)
        two.wait_said("shutting down")
        two.signal(signal.SIGTERM)
        assert {error_in(stream)["code"] for stream in streams} == {503}
        assert two.wait_exit() == 0
    assert wait_until(two.left_nothing)


def test_a_signal_while_loading_ends_all(start: Callable[..., Server]) -> None:
    server = start("--api-server-count", "3")
    assert server.engine_pid
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 128 + signal.SIGTERM
    assert wait_until(server.left_nothing)


def test_an_engine_killed_while_loading_is_told_in_one_line(start: Callable[..., Server]) -> None:
    server = start("--api-server-count", "3")
    psutil.Process(server.engine_pid).kill()
    assert server.wait_exit() == 3
    assert server.lines[-1] == "octavo: error: engine core process was killed by signal 9 (SIGKILL)"
    assert server.said("Traceback") is None
    assert wait_until(server.left_nothing)


def test_a_keys_limit_is_one_for_all_front_ends(start: Callable[..., Server], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("[{key: sk-a, name: a, requests_per_minute: 5}]")
    server = start("--api-server-count", "2", "--api-key-file", str(keys)).wait_ready()
    further(server)
    server.http.headers["x-api-key"] = "sk-a"
    body, begin = server.body(), time.monotonic()
    url = f"{server.url}/v1/completions"
    codes = [server.http.post(url, json=body).status_code for _ in range(MANY)]  # each by a connection of its own
    refilled = (time.monotonic() - begin) * 5 / 60
    assert set(codes) == {200, 429}
    assert 5 <= codes.count(200) <= 5 + refilled


def test_all_front_ends_take_a_changed_file_of_keys(start: Callable[..., Server], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("[{key: sk-old, name: old}]")
    server = start("--api-server-count", "2", "--api-key-file", str(keys)).wait_ready()
    further(server)
    (tmp_path / "new").write_text("[{key: sk-new, name: new}]")
    (tmp_path / "new").rename(keys)
    assert wait_until(lambda: sum("API keys were read again" in line for line in list(server.lines)) == 2, 20)
    for key, status in (("sk-old", 401), ("sk-new", 200)):
        headers = {"x-api-key": key}
        assert {server.http.get(f"{server.url}/v1/models", headers=headers).status_code for _ in range(MANY)} == {
            status
        }
