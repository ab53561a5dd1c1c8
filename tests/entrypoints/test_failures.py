"""What clients see when the engine cannot go on, is still loading, or is gone: OpenAI's error shape, and no insides."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from octavo.config import AnswerConfig, ServerConfig
from octavo.entrypoints import ServerState, build_app
from octavo.errors import ConfigError, EngineDeadError, NoTokenLeftError, RequestError, RequestFailedError

Error = Callable[..., dict[str, Any]]
Events = Callable[..., list[Any]]

FAILURES = [
    (RequestFailedError("the model's logits are NaN"), 500, "InternalServerError", "the model's logits are NaN"),
    (RuntimeError("/home/secret.py"), 500, "InternalServerError", "internal server error"),
    (
        EngineDeadError("killed by signal 9"),
        503,
        "Service Unavailable",
        "the engine has died; the server is going down",
    ),
    (NoTokenLeftError("all are forbidden"), 400, "BadRequestError", "all are forbidden"),
    (RequestError("it can never fit", param="prompt"), 400, "BadRequestError", "it can never fit"),
]


@pytest.mark.parametrize("door", ["complete", "chat"])
@pytest.mark.parametrize(("failure", "code", "kind", "message"), FAILURES, ids=lambda value: type(value).__name__)
class TestFailureOfOneRequest:
    def test_in_a_response(
        self, server: Any, error: Error, door: str, failure: Exception, code: int, kind: str, message: str
    ) -> None:
        server.engine.fail_after = (2, failure)
        found = error(getattr(server, door)(), code)
        assert (found["type"], found["message"]) == (kind, message)

    def test_in_a_stream(
        self, server: Any, events: Events, door: str, failure: Exception, code: int, kind: str, message: str
    ) -> None:
        server.engine.fail_after = (2, failure)
        *chunks, last = events(getattr(server, door)(stream=True))
        assert len([chunk for chunk in chunks if chunk["choices"]]) >= 2
        assert set(last) == {"error"}
        assert (last["error"]["code"], last["error"]["type"], last["error"]["message"]) == (code, kind, message)


def test_the_next_request_is_served(server: Any, canary: None) -> None:
    server.engine.fail_after = (1, RuntimeError("once"))
    assert server.complete().status_code == 500
    server.engine.fail_after = None


def test_what_is_told_is_short(server: Any, error: Error) -> None:
    server.engine.fail_after = (0, RequestFailedError("\x00" * 10_000))
    error(server.complete(), 500)


def test_one_failed_prompt_ends_the_others(server: Any, error: Error, canary: None) -> None:
    server.engine.fail_after = (1, RequestFailedError("no"))
    error(server.complete(prompt=["a", "b", "c"]), 500)
    assert server.engine.running == set()
    server.engine.fail_after = None


def test_while_loading(error: Error, make_server: Callable[..., Any]) -> None:
    server = make_server()
    server.state.services = None
    server.state.stage, server.state.progress = "weights", 0.41666
    health = server.get("/health")
    assert health.status_code == 503
    assert health.json() == {"status": "loading", "stage": "weights", "progress": 0.417}
    assert "(weights, 42%)" in error(server.complete(), 503)["message"]
    server.state.stage, server.state.progress = "kv cache", 0.0  # it takes a moment, of which nobody knows the share
    assert server.get("/health").json() == {"status": "loading", "stage": "kv cache"}
    assert "(kv cache)" in error(server.complete(), 503)["message"]
    for response in (server.complete(), server.chat(), server.get("/v1/models"), server.get("/metrics")):
        assert error(response, 503)["type"] == "Service Unavailable"
        assert int(response.headers["retry-after"]) > 0
    assert server.get("/version").status_code == 200


def test_when_the_engine_is_dead(server: Any, error: Error) -> None:
    server.engine.dead_error = EngineDeadError("the engine was killed by signal 9\nforged")
    health = server.get("/health")
    assert health.status_code == 503
    assert health.json() == {"status": "dead", "cause": "the engine was killed by signal 9\\x0aforged"}
    assert error(server.complete(), 503)["type"] == "Service Unavailable"
    assert server.get("/metrics").status_code == 200


def test_while_draining(server: Any, error: Error) -> None:
    server.state.draining = True
    assert server.get("/health").json() == {"status": "draining"}
    assert server.get("/health").status_code == 200
    error(server.chat(), 503)


def test_an_unknown_reasoning_parser_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"--reasoning-parser must be one of auto, none, think, .*; got 'magic'"):
        ServerState(ServerConfig(answer=AnswerConfig(reasoning_parser="magic")))


def test_a_fault_of_ours_in_any_route_says_nothing_of_it(server: Any, error: Error) -> None:
    server.engine.metrics.render = lambda: 1 / 0
    assert error(server.get("/metrics"), 500)["message"] == "internal server error"


def test_the_app_can_be_built_before_there_is_a_loop() -> None:
    state = ServerState()
    assert build_app(state) is not build_app(state)
    assert asyncio.run(state.active.wait_idle(0.1))
