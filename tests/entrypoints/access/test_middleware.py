"""The operator's own middleware, and a server under a prefix of paths."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from octavo.config import AccessConfig
from octavo.entrypoints.stream_parts import StreamParts
from octavo.errors import ConfigError
from tests.entrypoints.conftest import Connection

ROOM = "tests.entrypoints.access.middlewares"


@pytest.fixture
def make(make_server: Callable[..., Any]) -> Callable[..., Any]:
    def make(*names: str, **stated: Any) -> Any:
        return make_server(access=AccessConfig(middleware=[f"{ROOM}.{name}" for name in names], **stated))

    return make


@pytest.mark.parametrize("names", [["Marking", "mark_too"], ["mark_too", "Marking"]])
def test_the_first_sees_a_request_first_and_its_answer_last(make: Callable[..., Any], names: list[str]) -> None:
    marks = {"Marking": "class", "mark_too": "function"}
    answer = make(*names).complete()
    assert answer.status_code == 200
    assert answer.headers.get_list("x-marks") == [marks[name] for name in reversed(names)]


@pytest.mark.parametrize("names", [["Shouting"], ["Shouting", "Marking"], []])
def test_it_sees_every_part_of_a_stream(make: Callable[..., Any], names: list[str]) -> None:
    server = make(*names)
    server.app = StreamParts(server.app)  # as in the HTTP server
    body = server.complete(stream=True, max_tokens=6).content
    assert body.count(b"data: ") == 7 or body.count(b"DATA: ") == 7
    assert (body == body.upper()) == ("Shouting" in names)


def test_it_sees_what_is_refused_too(make: Callable[..., Any]) -> None:
    server = make("Marking", api_key=["sk-a"])
    assert server.get("/v1/models").headers["x-marks"] == "class"
    assert server.get("/v1/models").status_code == 401


def test_it_can_bring_the_key(make: Callable[..., Any]) -> None:
    server = make("bring_key", api_key=["sk-a"])
    assert server.get("/v1/models", headers={"cookie": "user=alice"}).status_code == 200
    assert server.get("/v1/models", headers={"cookie": "user=mallory"}).status_code == 401


def test_it_can_answer_itself(make: Callable[..., Any]) -> None:
    server = make("deny", allowed_origins=["*"])
    answer = server.get("/health", headers={"origin": "https://page.example"})
    assert (answer.status_code, answer.text) == (403, "no")
    assert answer.headers["access-control-allow-origin"] == "*"


def test_a_fault_in_it_is_an_error_in_the_usual_shape(make: Callable[..., Any], error: Callable[..., Any]) -> None:
    found = error(make("Marking", "Broken").get("/v1/models"), 500)
    assert found["message"] == "internal server error"


@pytest.mark.parametrize("name", ["Marking", "mark_too"])
def test_a_client_that_leaves_still_ends_its_request(make: Callable[..., Any], name: str) -> None:
    server = make(name)

    async def scenario() -> None:
        server.engine.hold_after = 2
        connection = Connection(server, "/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 9})
        while not server.engine.running:
            await asyncio.sleep(0)
        await connection.leave()

    asyncio.run(scenario())
    assert server.engine.aborted == server.engine.started
    assert len(server.engine.aborted) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Marking", "--middleware Marking: module.Name is expected"),
        ("no.such.Thing", "--middleware no.such.Thing cannot be imported: ModuleNotFoundError"),
        (f"{ROOM}.Absent", f"--middleware {ROOM}.Absent cannot be imported: AttributeError"),
        (f"{ROOM}.NOT_CALLABLE", f"--middleware {ROOM}.NOT_CALLABLE is neither a class nor a coroutine function"),
        (f"{ROOM}.plain", f"--middleware {ROOM}.plain is neither a class nor a coroutine function"),
        (f"{ROOM}.Unmakeable", f"--middleware {ROOM}.Unmakeable cannot be made: OSError: no licence"),
        (f"{ROOM}.Anonymous", f"--middleware {ROOM}.Anonymous cannot be made: TypeError"),
        ("..", "--middleware .. cannot be imported"),
    ],
)
def test_what_cannot_be_used_is_named(make_server: Callable[..., Any], name: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_server(access=AccessConfig(middleware=[name]))
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)


class TestRootPath:
    def test_paths_are_found_whether_the_proxy_strips_it_or_not(self, make: Callable[..., Any]) -> None:
        server = make(root_path="/llm")
        for prefix in ("", "/llm"):
            assert server.get(f"{prefix}/v1/models").status_code == 200
            assert server.get(f"{prefix}/health").status_code == 200
            body = {"prompt": "hi", "max_tokens": 1}
            assert server.post(f"{prefix}/v1/completions", body).status_code == 200
            assert server.get(f"{prefix}/nothing").status_code == 404
            assert server.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/llm"}]
        assert server.get("/other/v1/models").status_code == 404

    def test_opens_no_more_without_a_key(self, make: Callable[..., Any]) -> None:
        server = make(root_path="/llm", api_key=["sk-a"])
        assert server.get("/health").status_code == 200
        for path in ("/llm/health", "/llm/v1/models", "/v1/models", "/llm", "/llm/"):
            assert server.get(path).status_code == 401

    @pytest.mark.parametrize(
        "path", ["llm", "/llm/", "/", "//llm", "/a//b", "/l m", "/llм", "/a?b", "/a%2f", "http://a/llm"]
    )
    def test_must_look_like_one(self, make: Callable[..., Any], path: str) -> None:
        with pytest.raises(ConfigError, match="--root-path must be like /prefix"):
            make(root_path=path)
