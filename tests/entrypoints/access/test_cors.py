"""Pages in browsers: which may use the server, and that they can read every answer, refusals too."""

from collections.abc import Callable
from typing import Any

import pytest

from octavo.config import AccessConfig
from octavo.errors import ConfigError

PAGE, OTHER_PAGE = "https://page.example", "https://other.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def allowed(response: Any) -> str | None:
    return response.headers.get("access-control-allow-origin")  # type: ignore[no-any-return]


@pytest.fixture
def make(make_server: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **stated: make_server(access=AccessConfig(**stated))


def test_no_page_may_use_it_unless_that_is_stated(server: Any) -> None:
    for method in ("GET", "OPTIONS"):
        assert allowed(server.request(method, "/v1/models", headers={"origin": PAGE} | PREFLIGHT)) is None


def test_a_page_that_is_named_may_and_no_other(make: Callable[..., Any]) -> None:
    server = make(allowed_origins=[PAGE])
    asked = server.request("OPTIONS", "/v1/completions", headers={"origin": PAGE} | PREFLIGHT)
    assert (asked.status_code, allowed(asked)) == (200, PAGE)
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert allowed(server.complete()) is None  # no page at all
    answer = server.get("/v1/models", headers={"origin": PAGE})
    assert (answer.status_code, allowed(answer)) == (200, PAGE)
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    refused = server.request("OPTIONS", "/v1/completions", headers={"origin": OTHER_PAGE} | PREFLIGHT)
    assert (refused.status_code, allowed(refused)) == (400, None)
    assert allowed(server.get("/v1/models", headers={"origin": OTHER_PAGE})) is None


def test_all_may_where_that_is_stated(make: Callable[..., Any]) -> None:
    server = make(allowed_origins=["*"])
    for page in (PAGE, OTHER_PAGE):
        assert allowed(server.request("OPTIONS", "/tokenize", headers={"origin": page} | PREFLIGHT)) == "*"
        assert allowed(server.get("/v1/models", headers={"origin": page})) == "*"


def test_methods_and_headers_can_be_fewer(make: Callable[..., Any]) -> None:
    server = make(allowed_origins=["*"], allowed_methods=["GET"], allowed_headers=["x-api-key"])
    asked = {"origin": PAGE, "access-control-request-method": "GET"}
    assert server.request("OPTIONS", "/v1/models", headers=asked).status_code == 200
    for unfit in ({"access-control-request-method": "POST"}, {"access-control-request-headers": "x-other"}):
        assert server.request("OPTIONS", "/v1/models", headers=asked | unfit).status_code == 400


def test_a_preflight_needs_no_key_and_every_refusal_can_be_read(make: Callable[..., Any]) -> None:
    server = make(allowed_origins=[PAGE], api_key=["sk-a"])
    assert server.request("OPTIONS", "/v1/completions", headers={"origin": PAGE} | PREFLIGHT).status_code == 200
    # It opens nothing: a request that only looks like one is no preflight.
    assert server.request("OPTIONS", "/v1/completions", headers={"origin": PAGE}).status_code == 401
    assert server.get("/v1/models", headers={"origin": PAGE} | PREFLIGHT).status_code == 401
    with_key = {"origin": PAGE, "x-api-key": "sk-a"}
    server.engine.fail_after = (0, RuntimeError("a fault"))
    for code, answer in (
        (401, server.get("/v1/models", headers={"origin": PAGE})),
        (404, server.get("/nothing", headers=with_key)),
        (500, server.post("/v1/completions", {"prompt": "hi"}, headers=with_key)),
    ):
        assert (answer.status_code, allowed(answer)) == (code, PAGE)
    server.state.draining = True
    answer = server.post("/v1/completions", {"prompt": "hi"}, headers=with_key)
    assert (answer.status_code, allowed(answer)) == (503, PAGE)


def test_a_page_can_read_its_limits(make_server: Callable[..., Any], tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("[{key: sk-a, name: a, requests_per_minute: 1}]")
    server = make_server(access=AccessConfig(allowed_origins=[PAGE], api_key_file=str(file)))
    for code in (200, 429):
        body = {"prompt": "hi", "max_tokens": 1}
        answer = server.post("/v1/completions", body, headers={"origin": PAGE, "x-api-key": "sk-a"})
        assert (answer.status_code, allowed(answer)) == (code, PAGE)
        shown = answer.headers["access-control-expose-headers"]
        for name in ("retry-after", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"):
            assert name in shown


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"allowed_methods": ["GET"]}, "--allowed-methods has no effect without --allowed-origins"),
        ({"allowed_headers": ["x"]}, "--allowed-headers has no effect without --allowed-origins"),
        ({"allow_credentials": True}, "--allow-credentials has no effect without --allowed-origins"),
        ({"allow_credentials": True, "allowed_origins": ["*"]}, "--allow-credentials needs origins by name"),
        ({"allowed_origins": ["https://page.example/"]}, "an origin as browsers send it is expected"),
        ({"allowed_origins": ["page.example"]}, "an origin as browsers send it is expected"),
        ({"allowed_origins": ["https://Page.example"]}, "an origin as browsers send it is expected"),
        ({"allowed_origins": ["https://*.example, null"]}, "an origin as browsers send it is expected"),
    ],
)
def test_what_would_do_nothing_or_harm_is_refused(make: Callable[..., Any], stated: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**stated)


def test_credentials_of_a_page_that_is_named(make: Callable[..., Any]) -> None:
    server = make(allowed_origins=[PAGE], allow_credentials=True)
    answer = server.get("/v1/models", headers={"origin": PAGE})
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert allowed(answer) == PAGE
