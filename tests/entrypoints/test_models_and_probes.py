"""GET routes, ids of requests, and what /metrics counts."""

import json
from collections.abc import Callable
from typing import Any

import pytest

import octavo

Error = Callable[..., dict[str, Any]]


def test_model_cards(make_server: Callable[..., Any]) -> None:
    server = make_server(served_model_name=["a", "org/b"])
    body = server.get("/v1/models").json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["a", "org/b"]
    card = body["data"][1]
    created = card.pop("created")
    assert isinstance(created, int)
    assert card == {
        "id": "org/b",
        "object": "model",
        "owned_by": "octavo",
        "root": "m",
        "parent": None,
        "max_model_len": 64,
        "permission": [],
    }
    assert server.get("/v1/models/org/b").json() == {**card, "created": created}
    assert server.get("/v1/models/org%2Fb").json()["id"] == "org/b"
    assert server.complete(model="org/b").json()["model"] == "org/b"
    assert server.complete(model=None).json()["model"] == "a"


def test_version_and_health(server: Any) -> None:
    assert server.get("/version").json() == {"version": octavo.__version__}
    assert server.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("door", ["complete", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_id_is_the_clients_if_it_is_sane(server: Any, door: str, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "hi"} if door == "complete" else {"messages": [{"role": "user", "content": "hi"}]}
    path = "/v1/completions" if door == "complete" else "/v1/chat/completions"
    prefix = "cmpl-" if door == "complete" else "chatcmpl-"
    body |= {"stream": stream, "max_tokens": 1}

    def ask(**options: Any) -> tuple[str, str]:
        response = server.post(path, body | options.pop("fields", {}), **options)
        text = response.text.split("\n")[0].removeprefix("data: ")
        return response.headers["x-request-id"], json.loads(text)["id"]

    assert ask(headers={"x-request-id": "trace-7"}) == ("trace-7", prefix + "trace-7")
    assert ask(headers={"x-request-id": "a"}, fields={"request_id": "b"}) == ("b", prefix + "b")
    made, made_in_body = ask()
    assert made_in_body == prefix + made
    for insane in ("", "x" * 129, "two words", "é"):
        shown, _ = ask(headers={"x-request-id": insane.encode("latin-1")})
        assert shown not in (insane, made)


def test_the_same_id_twice_at_once_is_two_requests(server: Any) -> None:
    for _ in range(2):
        server.post("/v1/completions", {"prompt": "hi"}, headers={"x-request-id": "same"})
    assert len(set(server.engine.started)) == 2


def test_errors_have_the_id_too(server: Any, error: Error) -> None:
    response = server.post("/v1/completions", {"prompt": ""}, headers={"x-request-id": "trace-8"})
    error(response, 400, "prompt")
    assert response.headers["x-request-id"] == "trace-8"
    assert server.complete(n=0).headers["x-request-id"]


def test_metrics_are_in_prometheus_text(server: Any) -> None:
    server.complete(prompt="abc", max_tokens=5)
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert 'vllm:prompt_tokens_total{engine="0",model_name="m"} 3.0' in response.text
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 5.0' in response.text
