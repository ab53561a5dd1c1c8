"""A server with API keys is closed: every door, every spelling of it, but three exact paths (probe A22)."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config import AccessConfig, LogsConfig, ServerConfig
from octavo.entrypoints import ServerState, build_app
from octavo.entrypoints.access import ApiKey, Ledger, check_access, key_gate, read_api_keys
from octavo.errors import ConfigError
from tests.entrypoints.wire import WireServer

KEY, OTHER = "sk-one", "sk-two"
UNAUTHORIZED = {"error": "Unauthorized"}
# Spellings of doors: as a client may send them, none of which any key has been brought for.
TRICKS = [
    "//v1/models",
    "/v1//models",
    "/%76%31/models",
    "/v1%2fmodels",
    "/v1/models/",
    "/V1/MODELS",
    "/./v1/models",
    "/%2e/v1/models",
    "/health/../v1/models",
    "/health/..%2fv1/models",
    "/health/%2e%2e/v1/models",
    "/health%2f..%2fv1/models",
    "/health/v1/models",
    "/health;/v1/models",
    "/health%00/v1/models",
    "/health%3f/v1/models",
    "/%2fhealth",
    "//health",
    "/health/",
    "/HEALTH",
    "/%68ealth",
    "/healthz",
    "/health%20",
    "/v1/models?/health",
    "/v1/models?path=/health",
    "http://server/v1/models",
    "http://server//health",
    "http://health/v1/models",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/nothing",
    "/",
]
OPEN = ["/health", "/health?/v1/models", "/health#/v1/models", "http://server/health"]
NO_PATHS = ["*", "health", "?/health", "http://", "http:///health/..", "server:80", "/ health"]
WRONG = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer "},
    {"authorization": "Bearer"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Bearer {KEY},{OTHER}"},
    {"authorization": f"Basic {KEY}"},
    {"authorization": KEY},
    {"authorization": "Bearer " + "x" * 30_000},
    {"authorization": "Bearer schlüssel"},
    {"x-api-key": "wrong"},
    {"x-api-key": ""},
    {"x-api-key": f"Bearer {KEY}"},
    {"api-key": KEY},
    {"cookie": f"authorization=Bearer {KEY}"},
]


@pytest.fixture
def closed(make_server: Callable[..., Any]) -> Any:
    return make_server(access=AccessConfig(api_key=[KEY, OTHER]))


def doors(server: Any) -> list[tuple[str, str]]:
    """Every method of every route."""
    document = server.get("/openapi.json", headers={"x-api-key": KEY}).json()
    return [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]


@contextlib.contextmanager
def serving(app: Any) -> Iterator[WireServer]:
    server = WireServer(app, LogsConfig(disable_uvicorn_access_log=True))
    try:
        yield server
    finally:
        server.stop()


def open_to_nobody(server: WireServer) -> list[str]:
    """Requests without a key that were answered with anything but 401."""
    found = []
    for trick in TRICKS + NO_PATHS:
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"):
            for host in ("server", "a/health?", "/health", "health"):
                line = f"{method} {trick} HTTP/1.1\r\n"
                answer = server.talk(f"{line}host: {host}\r\nconnection: close\r\n\r\n".encode())
                if not answer.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 ")):
                    found.append(line.strip())
                if method == "GET" and host == "server" and trick in TRICKS:
                    assert answer.startswith(b"HTTP/1.1 401 "), line
    return found


class TestEveryDoor:
    @pytest.mark.parametrize("headers", WRONG, ids=lambda headers: str(headers)[:40])
    def test_needs_a_key(self, closed: Any, headers: dict[str, str]) -> None:
        sent = {name: value.encode() for name, value in headers.items()}
        asked = 0
        for method, path in doors(closed):
            for verb in {method, "GET", "POST", "OPTIONS"}:
                if (verb, path) not in (("GET", "/health"), ("GET", "/live"), ("GET", "/ready")):
                    response = closed.request(verb, path, headers=sent, content=b"{")
                    assert (response.status_code, response.json()) == (401, UNAUTHORIZED), (verb, path)
                    assert response.headers["www-authenticate"] == "Bearer"
                    asked += 1
        assert asked >= 20

    def test_opens_with_a_key_whichever_it_is_and_however_it_is_brought(self, closed: Any) -> None:
        for key in (KEY, OTHER):
            for headers in (
                {"authorization": f"Bearer {key}"},
                {"authorization": f"bearer  {key} "},
                {"x-api-key": key},
                {"x-api-key": key, "authorization": "Bearer of another server"},
                {"authorization": f"Bearer {key}", "x-api-key": "of another server"},
            ):
                assert closed.get("/v1/models", headers=headers).status_code == 200
                assert closed.get("/nothing", headers=headers).status_code == 404
                assert closed.get("/v1/completions", headers=headers).status_code == 405
                body = {"prompt": "hi", "max_tokens": 4, "temperature": 0}
                answer = closed.post("/v1/completions", body, headers=headers)
                assert answer.json()["choices"][0]["text"] == "abcd"

    def test_but_the_probes_is_closed_on_the_wire_too_however_it_is_spelt(self, closed: Any) -> None:
        with serving(closed.app) as server:
            assert open_to_nobody(server) == []
            for path in OPEN:  # the control
                for host in ("server", "a/v1/models?"):
                    asked = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
                    answer = server.talk(asked.encode())
                    assert answer.startswith(b"HTTP/1.1 200 "), path
                    assert answer.endswith(b'{"status":"ok"}')

    @pytest.mark.parametrize(
        "careless",
        [
            lambda scope: scope["path"].startswith("/health"),
            lambda scope: scope["path"].strip("/") == "health",
            lambda scope: scope["path"] == "/health",
            lambda scope: "/health" in scope["raw_path"].decode(),
            lambda scope: scope["path"].lower() == "/health",
            lambda scope: scope["method"] == "OPTIONS",
            lambda scope: not scope["path"].startswith("/v1"),
            lambda scope: b"/health" in dict(scope["headers"])[b"host"],
        ],
    )
    def test_control_a_careless_allow_list_is_noticed(
        self, closed: Any, monkeypatch: pytest.MonkeyPatch, careless: Callable[[Any], bool]
    ) -> None:
        monkeypatch.setattr(key_gate, "_is_open", careless)
        with serving(closed.app) as server, pytest.raises(AssertionError):
            assert open_to_nobody(server) == []


def test_the_description_says_what_needs_a_key(closed: Any) -> None:
    document = closed.get("/openapi.json", headers={"x-api-key": KEY}).json()
    described = {path: route for path, methods in document["paths"].items() for route in methods.values()}
    open_ones = {path for path, route in described.items() if route.get("security") == []}
    assert open_ones == {path for path, route in described.items() if "401" not in route["responses"]}
    assert open_ones == {"/health", "/live", "/ready"} & set(described)
    assert [*document["components"]["securitySchemes"]] == ["bearer", "x-api-key"]


class TestTheProbes:
    def test_need_no_key(self, closed: Any) -> None:
        assert closed.get("/health").status_code == 200
        assert closed.get("/health", headers={"authorization": "Bearer wrong"}).status_code == 200
        assert closed.request("HEAD", "/health").status_code in (200, 405)

    @pytest.mark.parametrize("path", ["/live", "/ready"])
    def test_are_let_through_whether_there_are_any(self, closed: Any, path: str) -> None:
        assert closed.get(path).status_code != 401

    def test_need_one_for_anything_but_reading(self, closed: Any) -> None:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert closed.request(method, "/health").status_code == 401

    def test_need_none_while_the_model_is_loading(self) -> None:
        loading = build_app(ServerState(ServerConfig(access=AccessConfig(api_key=[KEY]))))
        with serving(loading) as server:
            answer = server.talk(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 503 ")
            answer = server.talk(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 401 ")


def test_a_key_is_compared_to_its_last_bit() -> None:
    keys = [ApiKey(name=str(index), digest=hashlib.sha256(b"%d" % index).digest()) for index in range(300)]
    gate = key_gate.KeyGate(lambda *_: None, keys, Ledger(keys))  # type: ignore[arg-type, return-value]
    for index in range(300):
        found = gate._equal(b"%d" % index)
        assert found is not None
        assert found.name == str(index)
        assert gate._equal(b"x%d" % index) is None
    for bit in range(256):  # a digest that is one bit off is none of ours
        near = int.from_bytes(keys[0].digest) ^ (1 << bit)
        other = ApiKey(name="other", digest=near.to_bytes(32))
        assert key_gate.KeyGate(lambda *_: None, [other], Ledger([other]))._equal(b"0") is None  # type: ignore[arg-type, return-value]


def test_without_keys_the_server_is_open(server: Any) -> None:
    assert server.get("/v1/models").status_code == 200


def test_the_body_of_a_request_without_a_key_is_not_read(closed: Any) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("it was read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "headers": []}
    asyncio.run(closed.app(scope, receive, send))
    assert sent[0]["status"] == 401


def test_what_is_no_http_request_is_not_let_in(closed: Any) -> None:
    scope = {"type": "websocket", "path": "/health", "raw_path": b"/health", "headers": []}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    asyncio.run(closed.app(scope, receive, send))
    assert sent[0]["status"] == 401


def test_the_log_learns_the_keys_name_and_nothing_else(closed: Any) -> None:
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/version",
        "raw_path": b"/version",
        "query_string": b"",
        "headers": [(b"x-api-key", OTHER.encode())],
        "state": {},
    }
    before = dict(scope)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        pass

    asyncio.run(closed.app(scope, receive, send))
    assert before["state"]["api_key_name"] == "key-2"
    assert OTHER not in str(before["state"])


class TestWhereKeysComeFrom:
    def test_flags(self) -> None:
        assert [key.name for key in read_api_keys(AccessConfig(api_key=["a", "b"]))] == ["key-1", "key-2"]
        assert read_api_keys(AccessConfig()) == []

    def test_the_environment_where_no_flag_states_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OCTAVO_API_KEY", KEY)
        (key,) = read_api_keys(AccessConfig())
        assert key.digest == hashlib.sha256(KEY.encode()).digest()
        (key,) = read_api_keys(AccessConfig(api_key=["a"]))
        assert key.digest == hashlib.sha256(b"a").digest()
        monkeypatch.setenv("VLLM_API_KEY", OTHER)
        assert read_api_keys(AccessConfig())[0].digest == hashlib.sha256(KEY.encode()).digest()
        monkeypatch.setenv("OCTAVO_API_KEY", "")
        assert read_api_keys(AccessConfig())[0].digest == hashlib.sha256(OTHER.encode()).digest()
        monkeypatch.setenv("VLLM_API_KEY", "")
        assert read_api_keys(AccessConfig()) == []

    @pytest.mark.parametrize("key", ["two words", "ключ", "x" * 513, "a\nb"])
    def test_a_key_that_no_header_could_bring_is_refused_and_not_repeated(self, key: str) -> None:
        with pytest.raises(ConfigError, match="--api-key: key 2 must be 1 to 512 visible ASCII") as refused:
            read_api_keys(AccessConfig(api_key=["a", key]))
        assert key not in str(refused.value)

    def test_the_config_does_not_show_them(self) -> None:
        assert KEY not in repr(AccessConfig(api_key=[KEY]))
        assert KEY not in repr(read_api_keys(AccessConfig(api_key=[KEY])))


class TestKeyFile:
    @pytest.fixture
    def write(self, tmp_path: Path) -> Callable[[str], AccessConfig]:
        def write(text: str) -> AccessConfig:
            file = tmp_path / "keys.yaml"
            file.write_text(text)
            file.chmod(0o600)
            return AccessConfig(api_key_file=str(file))

        return write

    def test_everything_that_it_can_say(self, write: Callable[[str], AccessConfig]) -> None:
        digest = hashlib.sha256(b"sk-b").hexdigest()
        config = write(
            "- {key: sk-a, name: alice, requests_per_minute: 60, max_concurrent_requests: 2, priority: -5}\n"
            f"- sha256: {digest.upper()}\n  name: team/bob@x\n"
        )
        assert read_api_keys(config) == [
            ApiKey(
                name="alice",
                digest=hashlib.sha256(b"sk-a").digest(),
                requests_per_minute=60,
                max_concurrent_requests=2,
                priority=-5,
            ),
            ApiKey(name="team/bob@x", digest=bytes.fromhex(digest), priority=0),
        ]

    def test_json_is_yaml(self, write: Callable[[str], AccessConfig]) -> None:
        (key,) = read_api_keys(write(json.dumps([{"key": "sk-a", "name": "a"}])))
        assert (key.name, key.priority, key.is_limited) == ("a", None, False)

    def test_its_keys_and_those_of_the_flag_all_count(self, write: Callable[[str], AccessConfig]) -> None:
        file = write("[{key: sk-a, name: a}]").api_key_file
        assert [key.name for key in read_api_keys(AccessConfig(api_key=["b"], api_key_file=file))] == ["key-1", "a"]

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "a list of keys is expected"),
            ("[]", "a list of keys is expected"),
            ("{key: sk-secret, name: a}", "a list of keys is expected"),
            ("- sk-secret", "entry 1: key (or sha256) and name are expected"),
            ("- {key: sk-secret}", "entry 1: name must be 1 to 64 letters"),
            ("- name: a\n  key: sk-secret\n  name: b\n  key: sk-other", "line 3 says again what line 1 says"),
            ("- {key: sk-secret, name: 'a b'}", "entry 1: name must be 1 to 64 letters"),
            ("- {key: sk-secret, name: 5}", "entry 1: name must be"),
            ("- {name: a}", "entry 1 (a): either key or sha256 is expected"),
            (f"- {{name: a, key: sk-secret, sha256: {'0' * 63}a}}", "entry 1 (a): either key or sha256 is expected"),
            ("- {name: a, key: 12345}", "entry 1 (a): key must be text (in quotes, if it looks like a number)"),
            ("- {name: a, key: sk-secret two}", "entry 1 (a): key must be text"),
            ("- {name: a, key: ''}", "entry 1 (a): key must be text"),
            ("- {name: a, sha256: sk-secret}", "entry 1 (a): sha256 must be 64 hexadecimal digits"),
            ("- {key: a, name: a}\n- {key: b, name: b, sk-secret: 5}", "entry 2 (b): one of its fields is unknown"),
            ("- {key: a, name: a, rpm: 5}", "known: key, sha256, name, requests_per_minute,"),
            ("- {key: a, name: a, requests_per_minute: 0}", "requests_per_minute must be a whole number between 1 and"),
            ("- {key: a, name: a, requests_per_minute: 1.5}", "requests_per_minute must be a whole number"),
            ("- {key: a, name: a, requests_per_minute: true}", "requests_per_minute must be a whole number"),
            ("- {key: a, name: a, max_concurrent_requests: '5'}", "max_concurrent_requests must be a whole number"),
            ("- {key: a, name: a, priority: 1e3}", "priority must be a whole number"),
            ("- {key: sk-secret, name: a}\n- {key: b, name: a}", "two API keys have the name 'a'"),
            ("- {key: sk-secret, name: a}\n- {key: sk-secret, name: b}", "API keys 'a' and 'b' are the same key"),
            ("- {key: *sk-secret, name: a}", "is neither YAML nor JSON (line 1)"),
            ("- {key: 'sk-secret, name: a}", "is neither YAML nor JSON (line"),
            ("- key: !!python/name:sk-secret x", "is neither YAML nor JSON"),
            ("[" * 2_000, "is neither YAML nor JSON"),
            ("\x00", "is neither YAML nor JSON"),
            ("- {key: a, name: a}" + " " * (1 << 20), "larger than 1048576 bytes"),
        ],
    )
    def test_a_mistake_is_named_by_its_entry_without_the_key(
        self, write: Callable[[str], AccessConfig], text: str, says: str
    ) -> None:
        with pytest.raises(ConfigError) as refused:
            read_api_keys(write(text))
        message = str(refused.value)
        assert message.startswith(("--api-key-file", "two API keys", "API keys"))
        assert says in message
        assert "secret" not in message
        assert "\n" not in message

    def test_a_file_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match=r"--api-key-file /no/such/file cannot be read: No such file"):
            read_api_keys(AccessConfig(api_key_file="/no/such/file"))

    def test_one_that_others_can_read_is_warned_about(
        self, write: Callable[[str], AccessConfig], capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = write("[{key: sk-a, name: a}]")
        file = Path(str(config.api_key_file))
        for mode in (0o600, 0o640):  # a service is often given its secrets by its group
            file.chmod(mode)
            check_access(config, "fcfs")
        assert "chmod" not in capsys.readouterr().err
        file.chmod(0o644)
        check_access(config, "fcfs")
        assert "is open to others (mode 0644); chmod 600 it" in capsys.readouterr().err

    def test_the_log_says_whose_they_are_or_that_there_are_none(
        self, write: Callable[[str], AccessConfig], capsys: pytest.CaptureFixture[str]
    ) -> None:
        check_access(write("[{key: sk-a, name: alice}, {key: sk-b, name: bob}]"), "fcfs")
        told = capsys.readouterr().err
        assert "API keys: alice, bob" in told
        assert "sk-" not in told
        check_access(AccessConfig(), "fcfs")
        assert "API keys: none, the server is open" in capsys.readouterr().err

    def test_priorities_need_the_scheduling_policy(self, write: Callable[[str], AccessConfig]) -> None:
        config = write("[{key: sk-a, name: a, priority: 1}]")
        with pytest.raises(
            ConfigError, match=r"--api-key-file: the priorities in it need --scheduling-policy priority"
        ):
            check_access(config, "fcfs")
        check_access(config, "priority")
        check_access(AccessConfig(api_key=["a"]), "fcfs")
