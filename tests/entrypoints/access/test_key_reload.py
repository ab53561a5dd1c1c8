"""A file of keys that changes while the server runs."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.config import AccessConfig
from octavo.entrypoints.access import key_reload

OLD, NEW = {"x-api-key": "sk-old"}, {"x-api-key": "sk-new"}
OLD_FILE = "[{key: sk-old, name: old, requests_per_minute: 3}]"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(key_reload, "_SECONDS", 0.005)
    file = tmp_path / "keys.yaml"
    file.write_text(OLD_FILE)
    return file


@pytest.fixture
def server(make_server: Callable[..., Any], file: Path) -> Any:
    return make_server(access=AccessConfig(api_key_file=str(file)))


@pytest.fixture
def said(server: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``said(text, policy)``: lets the server look at its file until the log says so; what it has said."""

    def wait(text: str, policy: str = "fcfs") -> str:
        told, deadline = "", time.monotonic() + 20
        while text not in told:
            assert time.monotonic() < deadline, told
            with contextlib.suppress(TimeoutError):
                asyncio.run(asyncio.wait_for(server.state.refresh_access(policy), 0.05))
            told += capsys.readouterr().err
        return told

    return wait


def status(server: Any, headers: dict[str, str]) -> int:
    return int(server.get("/v1/models", headers=headers).status_code)


def test_new_keys_open_and_old_ones_do_not(server: Any, file: Path, said: Callable[..., str]) -> None:
    assert (status(server, OLD), status(server, NEW)) == (200, 401)
    file.write_text("[{key: sk-new, name: new, max_concurrent_requests: 2}]")
    assert (status(server, OLD), status(server, NEW)) == (200, 401)  # nobody has looked yet: the control
    told = said("API keys were read again")
    assert told.rstrip().endswith(f"from {file}: new")
    assert (status(server, OLD), status(server, NEW)) == (401, 200)
    assert server.post("/tokenize", {"prompt": "hi"}, headers=NEW).status_code == 200


def test_what_was_used_of_a_limit_stays_used(server: Any, file: Path, said: Callable[..., str]) -> None:
    for _ in range(2):
        assert server.post("/tokenize", {"prompt": "hi"}, headers=OLD).status_code == 200
    file.write_text("[{key: sk-new, name: new}, {key: sk-old, name: still, requests_per_minute: 3}]")
    said("API keys were read again")
    codes = [server.post("/tokenize", {"prompt": "hi"}, headers=OLD).status_code for _ in range(2)]
    assert codes == [200, 429]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "is neither YAML nor JSON"),
        ("[]", "a list of keys is expected"),
        ("[{key: sk-new}]", "name must be"),
        ("[{key: sk-new, name: new, priority: 1}]", "need --scheduling-policy priority, not fcfs"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_wrong_changes_nothing_and_is_told_of_once(
    server: Any, file: Path, said: Callable[..., str], text: str | None, says: str
) -> None:
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    told = said("the API keys stay as they are: ")
    assert says in told
    assert "sk-new" not in told
    assert (status(server, OLD), status(server, NEW)) == (200, 401)
    file.write_text("[{key: sk-new, name: new}]")
    assert "the API keys stay" not in said("API keys were read again")
    assert (status(server, OLD), status(server, NEW)) == (401, 200)


def test_priorities_are_taken_where_they_have_an_effect(server: Any, file: Path, said: Callable[..., str]) -> None:
    file.write_text("[{key: sk-new, name: new, priority: 1}]")
    said("API keys were read again", "priority")
    assert status(server, NEW) == 200
