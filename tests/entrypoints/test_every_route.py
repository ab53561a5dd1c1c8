"""What no route may forget: each that the server describes refuses what is wrong for all of them. The routes come from
the OpenAPI description, so that a new one is here before its own tests are written."""

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

Error = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.usefixtures("canary")

# By their description they read a body, but it is not what these probes are about.
_VALID = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
_NO_JSON_OBJECT = [b"", b'{"model":', b"[]", b'"x"', b"null", b"42", b"\xff\xfe", b'{"a": 1} {"b": 2}']
_HOSTILE = {
    "half a surrogate pair": b'{"user":"\\ud800"}',
    "5000 digits": b'{"user":' + b"1" * 5000 + b"}",
    "deep arrays": b'{"user":' + b"[" * 9_000 + b"]" * 9_000 + b"}",
    "deep and cut off": b'{"user":' + b"[" * 9_000,
}


def routes(server: Any, method: str) -> list[str]:
    """Paths that take this method, those with parameters filled in."""
    paths = server.get("/openapi.json").json()["paths"]
    return [path.replace("{name}", "m") for path, methods in paths.items() if method in methods]


def test_the_routes_that_take_a_body_are_these(server: Any) -> None:
    """A new one must be given a valid body here, and is then held to all the rest."""
    assert set(routes(server, "post")) == set(_VALID)


@pytest.mark.parametrize("path", _VALID)
class TestEveryRouteWithABody:
    def test_takes_its_valid_body(self, server: Any, path: str) -> None:
        """The control."""
        assert server.post(path, _VALID[path]).status_code == 200

    @pytest.mark.parametrize("body", _NO_JSON_OBJECT)
    def test_refuses_what_is_no_json_object(self, server: Any, error: Error, path: str, body: bytes) -> None:
        assert error(server.post(path, body), 400)["type"] == "Bad Request"

    @pytest.mark.parametrize("body", _HOSTILE.values(), ids=_HOSTILE)
    def test_refuses_hostile_json(self, server: Any, error: Error, path: str, body: bytes) -> None:
        error(server.post(path, body), 400)

    @pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-www-form-urlencoded"])
    def test_refuses_another_content_type(self, server: Any, error: Error, path: str, content_type: str) -> None:
        response = server.post(path, b'{"prompt":"hi"}', headers={"content-type": content_type})
        assert "Content-Type" in error(response, 400)["message"]

    @pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "GZIP"])
    def test_says_that_it_unpacks_no_body(self, server: Any, error: Error, path: str, encoding: str) -> None:
        body = gzip.compress(json.dumps(_VALID[path]).encode())
        response = server.post(path, body, headers={"content-encoding": encoding})
        message = error(response, 415)["message"]
        assert message == f"the request body is compressed (Content-Encoding: {encoding}); send it as it is"
        assert response.headers["accept-encoding"] == "identity"

    @pytest.mark.parametrize("encoding", ["identity", "Identity ", ""])
    def test_control_takes_a_body_that_is_said_to_be_plain(self, server: Any, path: str, encoding: str) -> None:
        body = json.dumps(_VALID[path]).encode()
        assert server.post(path, body, headers={"content-encoding": encoding}).status_code == 200

    def test_does_not_know_another_model(self, server: Any, error: Error, path: str) -> None:
        response = server.post(path, _VALID[path] | {"model": "nope"})
        assert error(response, 404, "model")["type"] == "NotFoundError"

    @pytest.mark.parametrize("model", [5, [], {}, True])
    def test_refuses_a_model_that_is_no_name(self, server: Any, error: Error, path: str, model: Any) -> None:
        error(server.post(path, _VALID[path] | {"model": model}), 400, "model")

    def test_refuses_a_body_beyond_the_limit(self, server: Any, error: Error, path: str) -> None:
        error(server.post(path, b'{"user":"' + b"x" * 30_000 + b'"}'), 413)

    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
    def test_refuses_other_methods(self, server: Any, error: Error, path: str, method: str) -> None:
        response = server.request(method, path)
        assert error(response, 405)
        assert response.headers["allow"] == "POST"

    def test_names_what_it_does_not_know(self, server: Any, make_server: Any, error: Error, path: str) -> None:
        body = _VALID[path] | {"no_such_field": 1}
        assert server.post(path, body).headers["x-octavo-ignored"] == "no_such_field"
        error(make_server(strict_requests=True).post(path, body), 400, "no_such_field")

    @pytest.mark.parametrize("state", ["loading", "draining"])
    def test_says_when_it_cannot_serve(self, make_server: Any, error: Error, path: str, state: str) -> None:
        server = make_server()
        if state == "loading":
            server.state.services = None
        else:
            server.state.draining = True
        response = server.post(path, _VALID[path])
        assert error(response, 503)["type"] == "Service Unavailable"
        assert int(response.headers["retry-after"]) > 0


def test_every_route_that_is_read_refuses_to_be_written(server: Any, error: Error) -> None:
    read = [path for path in routes(server, "get") if path not in _VALID]
    assert {"/health", "/metrics", "/v1/models", "/version"} <= set(read)
    for path in read:
        for method in ("POST", "PUT", "DELETE"):
            error(server.request(method, path, json={}), 405)
