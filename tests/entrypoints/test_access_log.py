"""A line for each request when it has ended, with an id that the answer says, too; and no forged ones."""

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.config import LogsConfig
from octavo.entrypoints.access_log import AccessLog
from octavo.errors import ConfigError, EngineDeadError, RequestFailedError
from octavo.logging import set_log_format

COMPLETION = {"model": "m", "prompt": "hi there", "max_tokens": 4, "temperature": 0}


class Kept(logging.Handler):
    """Attributes: records, and lines as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def lines(self) -> list[str]:
        formatter = logging.getLogger("octavo").handlers[0].formatter
        assert formatter is not None
        return [formatter.format(record) for record in self.records]

    @property
    def fields(self) -> dict[str, Any]:
        """Those of the only record."""
        (record,) = self.records
        fields: dict[str, Any] = record.fields
        return fields


@pytest.fixture
def access() -> Iterator[Kept]:
    yield from _kept("octavo.access")


@pytest.fixture
def requests() -> Iterator[Kept]:
    yield from _kept("octavo.requests")


def _kept(name: str) -> Iterator[Kept]:
    kept = Kept()
    logging.getLogger(name).addHandler(kept)
    yield kept
    logging.getLogger(name).removeHandler(kept)


@pytest.fixture
def as_json(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OCTAVO_LOG_FORMAT", "json")
    set_log_format("json")
    yield
    set_log_format("text")


@pytest.fixture
def logged(make_server: Any) -> Any:
    """``logged(**LogsConfig)`` → a server whose outermost layer is the access log."""

    def make(**logs: Any) -> Any:
        config = LogsConfig(**logs)
        server = make_server(logs=config)
        server.app = AccessLog(server.app, config)
        return server

    return make


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("door", ["complete", "chat"])
def test_a_request_is_a_line_with_its_counts(logged: Any, access: Kept, door: str, stream: bool) -> None:
    answer = getattr(logged(), door)(stream=stream)
    assert answer.status_code == 200
    fields = access.fields
    path = {"complete": "/v1/completions", "chat": "/v1/chat/completions"}[door]
    assert (fields["method"], fields["path"]) == ("POST", path)
    assert fields["status"] == 200
    assert fields["client"] == "127.0.0.1:123"
    assert fields["request_id"] == answer.headers["x-request-id"]
    assert 0 <= fields["first_byte_seconds"] <= fields["seconds"] < 5
    assert "stream_error" not in fields
    assert fields["completion_tokens"] == 4
    assert fields["prompt_tokens"] == {"complete": 2, "chat": 4}[door]
    (line,) = access.lines
    assert line.startswith("INFO ")
    assert f'[octavo.access] 127.0.0.1:123 "POST {path}" 200 request_id=' in line
    assert line.endswith(f"prompt_tokens={fields['prompt_tokens']} completion_tokens=4")


@pytest.mark.usefixtures("as_json")
def test_a_line_may_be_an_object_of_json(logged: Any, access: Kept) -> None:
    logged().complete(prompt="naïve\n")
    (line,) = access.lines
    shown = json.loads(line)
    assert access.fields.items() <= shown.items()
    assert (shown["level"], shown["logger"]) == ("INFO", "octavo.access")
    assert shown["time"].endswith("Z")
    assert shown["message"].startswith('127.0.0.1:123 "POST /v1/completions" 200')


@pytest.mark.usefixtures("as_json")
def test_every_line_of_octavo_is_an_object_of_json_then(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("octavo.engine")
    logger.info("a\nb")
    try:
        raise ValueError("c\nd")
    except ValueError:
        logger.exception("failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["a\nb", "failed"]
    assert lines[1]["exception"].endswith("ValueError: c\nd")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/health", 200), ("GET", "/x", 404), ("PUT", "/", 404)])
def test_every_answer_has_an_id_and_a_line(logged: Any, access: Kept, method: str, path: str, status: int) -> None:
    answer = logged().request(method, path)
    assert answer.status_code == access.fields["status"] == status
    assert answer.headers["x-request-id"] == access.fields["request_id"] != ""
    assert "completion_tokens" not in access.fields


def test_a_refused_request_is_a_line(logged: Any, access: Kept) -> None:
    answer = logged().complete(temperature=-1)
    assert answer.status_code == access.fields["status"] == 400
    assert answer.headers["x-request-id"] == access.fields["request_id"]


def test_a_client_names_its_requests(logged: Any, access: Kept) -> None:
    answer = logged().post("/v1/completions", COMPLETION, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == access.fields["request_id"] == "mine-1"


def test_the_id_in_the_body_is_the_id(logged: Any, access: Kept) -> None:
    answer = logged().complete(request_id="mine-2")
    assert answer.headers["x-request-id"] == access.fields["request_id"] == "mine-2"


@pytest.mark.parametrize("forged", ["a b", 'a"', "a" * 129, "é"])
def test_an_id_that_is_not_fit_for_a_line_is_replaced(logged: Any, access: Kept, forged: str) -> None:
    answer = logged().get("/health", headers=[(b"x-request-id", forged.encode())])
    if forged == 'a"':  # visible and no separator: it stands at the end of its field
        assert answer.headers["x-request-id"] == forged
    else:
        assert answer.headers["x-request-id"] == access.fields["request_id"] != forged


@pytest.mark.parametrize(
    "path", ['/a" 200 request_id=x', "/a%0AINFO%2012:00:00 [octavo] x", "/\x0ba", "/é", "/" + "a" * 100_000]
)
def test_no_path_forges_a_line_or_a_field(logged: Any, access: Kept, path: str) -> None:
    app = logged().app
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "client": ('1" 200 x=\n', 1),
    }

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    asyncio.run(app(scope, receive, send))
    (line,) = access.lines
    assert line.count("\n") == 0
    assert line.count('"') == 2
    assert line.count(" request_id=") == 1
    assert "INFO 12" not in line.removeprefix("INFO ")  # at noon, too
    assert len(line) < 600


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_a_line_with_what_it_got(logged: Any, access: Kept, connect: Any, stream: bool) -> None:
    server = logged()
    server.engine.hold_after = 3

    async def scenario() -> None:
        connection = connect(server, "/v1/completions", COMPLETION | {"max_tokens": 20, "stream": stream})
        if stream:
            for _ in range(4):
                await connection.next()
        while not server.engine.running:
            await asyncio.sleep(0)
        await connection.leave()

    asyncio.run(scenario())
    assert access.fields["status"] == 499
    assert access.fields.get("completion_tokens") == (3 if stream else None)


@pytest.mark.parametrize(
    ("failure", "told"), [(RequestFailedError("no"), 500), (EngineDeadError("gone"), 503), (RuntimeError("no"), 500)]
)
@pytest.mark.parametrize("door", ["complete", "chat"])
def test_a_stream_that_ends_with_an_error_says_so(
    logged: Any, access: Kept, door: str, failure: Exception, told: int
) -> None:
    """Its status was sent before."""
    server = logged()
    server.engine.fail_after = (2, failure)
    assert f'"code":{told}' in getattr(server, door)(stream=True).text
    assert (access.fields["status"], access.fields["stream_error"]) == (200, told)
    (line,) = access.lines
    assert f" stream_error={told} " in line
    access.records.clear()
    assert getattr(server, door)().status_code == access.fields["status"] == told  # the control: a whole answer
    assert "stream_error" not in access.fields


def test_an_app_that_fails_is_a_line(access: Kept) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError

    transport = httpx.ASGITransport(AccessLog(app, LogsConfig()), raise_app_exceptions=False)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await client.get("/")

    asyncio.run(ask())
    assert access.fields["status"] == 500


def test_what_other_layers_know_of_the_client_is_shown(access: Kept) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["api_key_name"] = "team a\n"
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def ask() -> None:
        transport = httpx.ASGITransport(AccessLog(app, LogsConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await client.get("/")

    asyncio.run(ask())
    assert access.fields["key"] == "team?a?"


def test_lines_can_be_left_out(logged: Any, access: Kept) -> None:
    server = logged(disable_access_log_for_endpoints="/health,/live")
    server.get("/health")
    assert access.records == []
    server.get("/version")  # the control
    assert access.fields["path"] == "/version"
    assert logged(disable_uvicorn_access_log=True).get("/version").headers["x-request-id"]
    assert len(access.records) == 1


def test_prompts_are_logged_only_where_that_was_asked_for(logged: Any, requests: Kept) -> None:
    assert logged().complete().status_code == 200
    assert requests.records == []
    server = logged(enable_log_requests=True, max_log_len=5)
    assert server.complete(prompt="a\nb" * 9, seed=7, stop=["x"] * 4).status_code == 200
    fields = requests.fields
    assert fields["prompt"] == "a\nba\n"
    assert len(fields["prompt_token_ids"]) == 5
    assert fields["params"]["seed"] == "7"
    assert "n" not in fields["params"]
    (line,) = requests.lines
    assert "prompt 'a\\nba\\n'" in line
    assert "\n" not in line
    assert server.chat().status_code == 200
    assert requests.records[1].fields["prompt"] == "u:hi"


def test_a_request_that_is_refused_is_not_logged_as_received(logged: Any, requests: Kept) -> None:
    assert logged(enable_log_requests=True).complete(max_tokens=10**6).status_code == 400
    assert requests.records == []


# ---- answers --------------------------------------------------------------------------------------------------------


def test_answers_are_logged_only_where_that_was_asked_for(logged: Any, requests: Kept) -> None:
    assert logged(enable_log_requests=True).complete().status_code == 200
    assert len(requests.records) == 1  # the prompt: the control
    server = logged(enable_log_requests=True, enable_log_outputs=True, max_log_len=3)
    for stream in (False, True):
        requests.records.clear()
        assert server.complete(n=2, temperature=1, stream=stream).status_code == 200
        asked, *answers = requests.records
        told = [(each.fields["index"], each.fields["text"], each.fields["finish_reason"]) for each in answers]
        assert sorted(told) == [(0, "abc", "length"), (1, "abc", "length")]
        assert {each.fields["request_id"] for each in answers} == {asked.fields["request_id"]}
    assert "choice 0: text 'abc', finish_reason length" in "".join(requests.lines)
    requests.records.clear()
    assert server.chat(stream=True).status_code == 200
    assert requests.records[1].fields["text"] == "abc"


def test_an_answer_that_breaks_off_is_logged_as_far_as_it_came(logged: Any, requests: Kept) -> None:
    server = logged(enable_log_requests=True, enable_log_outputs=True)
    server.engine.answer = "a\nforged line"
    server.engine.fail_after = (3, RequestFailedError("it went wrong"))
    server.complete(stream=True, max_tokens=9)
    fields = requests.records[1].fields
    assert (fields["text"], fields["finish_reason"]) == ("a\nf", "abort")
    assert "\n" not in requests.lines[1]


def test_answers_cannot_be_logged_without_requests(logged: Any) -> None:
    with pytest.raises(ConfigError, match="--enable-log-outputs needs --enable-log-requests"):
        logged(enable_log_outputs=True)
