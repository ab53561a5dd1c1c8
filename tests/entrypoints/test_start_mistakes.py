"""What is wrong with how a server is to be reached, and by whom, ends its start before an engine is thought of."""

import socket
from pathlib import Path
from typing import Any

import pytest

from octavo.config import AccessConfig, EngineArgs, HttpConfig, ServerConfig
from octavo.entrypoints import launcher, serve
from octavo.errors import ConfigError


class EngineWasBuiltError(Exception):
    pass


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_config(*_: Any) -> None:
        raise EngineWasBuiltError

    monkeypatch.setattr(launcher, "build_config", build_config)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.parametrize(
    ("http", "access", "says"),
    [
        ({"ssl_certfile": "/no/cert"}, {}, "--ssl-certfile /no/cert cannot be read"),
        ({"ssl_keyfile": "/no/key"}, {}, "--ssl-keyfile needs --ssl-certfile"),
        ({}, {"api_key_file": "/no/keys"}, "--api-key-file /no/keys cannot be read"),
        ({}, {"api_key_file": "keys"}, "--scheduling-policy priority, not fcfs"),
        ({}, {"middleware": ["no.Such"]}, "--middleware no.Such cannot be imported"),
        ({}, {"allowed_origins": ["page"]}, "--allowed-origins 'page'"),
        ({}, {"root_path": "x"}, "--root-path must be like /prefix"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded_and_the_port_is_free_again(
    http: dict[str, Any],
    access: dict[str, Any],
    says: str,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("keys").write_text("[{key: sk-a, name: a, priority: 1}]")
    config = ServerConfig(http=HttpConfig(port=port, **http), access=AccessConfig(**access))
    with pytest.raises(ConfigError) as refused:
        serve(EngineArgs(model="m"), config)
    assert says in str(refused.value)
    socket.create_server(("127.0.0.1", port)).close()


def test_a_unix_socket_in_use_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind("sock")
        other.listen()
        with pytest.raises(ConfigError, match="--uds sock is in use"):
            serve(EngineArgs(model="m"), ServerConfig(http=HttpConfig(uds="sock")))
        assert Path("sock").exists()


def test_control_where_nothing_is_wrong_the_engine_comes_next(port: int) -> None:
    with pytest.raises(EngineWasBuiltError):
        serve(EngineArgs(model="m"), ServerConfig(http=HttpConfig(port=port)))
