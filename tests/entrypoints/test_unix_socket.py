"""``--uds``: a Unix socket that is there while the server is, takes a dead server's place, and harms no other file."""

import contextlib
import fcntl
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.config import HttpConfig
from octavo.engine import early_engine
from octavo.entrypoints import unix_socket
from octavo.entrypoints.listen import listening, url_of
from octavo.errors import ConfigError
from tests.entrypoints.wire import WireServer


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # where pytest's own folders make paths too long
    return Path("server.sock")


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def leave_stale(path: Path) -> None:
    """What a server leaves that was killed."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()


def test_it_listens_there_at_once_and_removes_it_at_the_end(path: Path) -> None:
    with listening(HttpConfig(uds=str(path)), None) as (sock,):
        assert url_of(sock) == url_of(sock, "https") == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o640), (0o007, 0o660), (0o077, 0o600), (0, 0o660)])
def test_others_may_never_connect_and_the_group_where_the_umask_lets_it(path: Path, mask: int, mode: int) -> None:
    with umask(mask), listening(HttpConfig(uds=str(path)), None):
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_dead_servers_socket_is_taken_over(path: Path) -> None:
    leave_stale(path)
    with listening(HttpConfig(uds=str(path)), None), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_live_ones_is_in_use_and_stays(path: Path) -> None:
    with listening(HttpConfig(uds=str(path)), None):
        with (
            pytest.raises(ConfigError, match=r"--uds server.sock is in use; .* choose another path"),
            listening(HttpConfig(uds=str(path)), None),
        ):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


@pytest.mark.parametrize("kind", ["file", "folder", "link to a file", "link to nothing", "pipe"])
def test_what_is_no_socket_is_never_deleted(path: Path, kind: str) -> None:
    other = Path("precious")
    other.write_text("precious")
    makers: dict[str, Any] = {
        "file": lambda: path.write_text("precious"),
        "folder": path.mkdir,
        "link to a file": lambda: path.symlink_to(other),
        "link to nothing": lambda: path.symlink_to("nothing"),
        "pipe": lambda: os.mkfifo(path),
    }
    makers[kind]()
    before = path.lstat()
    with pytest.raises(ConfigError, match="what is there is no socket"), listening(HttpConfig(uds=str(path)), None):
        pass
    assert path.lstat() == before
    assert other.read_text() == "precious"


def test_another_servers_socket_is_not_removed_at_the_end(path: Path) -> None:
    with listening(HttpConfig(uds=str(path)), None):
        path.unlink()
        leave_stale(path)
    assert path.exists()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (HttpConfig(uds="/" + "x" * 107), "longer than the 107 bytes"),
        (HttpConfig(uds="/no/such/folder/sock"), "--uds /no/such/folder/sock: cannot listen there: No such file"),
        (HttpConfig(uds="sock", port=8001), "--port has no effect with --uds"),
        (HttpConfig(uds="sock", host="0.0.0.0"), "--host has no effect with --uds"),
    ],
)
def test_mistakes_are_told(path: Path, config: HttpConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says), listening(config, None):
        pass
    assert not Path("sock").exists()


def test_of_many_that_start_at_once_one_has_it(path: Path) -> None:
    leave_stale(path)
    begin = threading.Barrier(8)
    end = threading.Barrier(8)
    refused: list[str] = []

    def start() -> None:
        begin.wait()
        try:
            with listening(HttpConfig(uds=str(path)), None):
                end.wait()
        except ConfigError as error:
            refused.append(str(error))
            end.wait()

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(refused) == 7
    assert all("is in use" in message for message in refused)


def test_a_folder_that_somebody_keeps_locked_does_not_hold_up_the_start_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_socket, "_LOCK_SECONDS", 0.1)
    folder = os.open(".", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with (
        pytest.raises(ConfigError, match="another process keeps its folder locked"),
        listening(HttpConfig(uds=str(path)), None),
    ):
        pass
    os.close(folder)
    with listening(HttpConfig(uds=str(path)), None):  # the control
        pass


def test_it_is_removed_with_the_servers_folder_whoever_removes_that(path: Path) -> None:
    """When the first process is killed, the others end and remove the folder."""
    with contextlib.ExitStack() as killed:
        with early_engine() as folder:
            killed.enter_context(listening(HttpConfig(uds=str(path)), folder))
            assert path.exists()
        assert not path.exists()
        assert not folder.exists()


def test_every_front_end_has_the_same_one(path: Path) -> None:
    with listening(HttpConfig(uds=str(path), api_server_count=3), None) as sockets:
        assert len(sockets) == 3
        for sock in sockets:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                sock.setblocking(True)
                sock.accept()[0].close()


def test_the_app_answers_on_it(path: Path, server: Any) -> None:
    with listening(HttpConfig(uds=str(path)), None) as (sock,):
        wire = WireServer(server.app, sock=sock)
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
                assert client.get("/health").json() == {"status": "ok"}
                answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4, "temperature": 0})
                assert answer.json()["choices"][0]["text"] == "abcd"
        finally:
            wire.stop()
