"""schemathesis over /openapi.json: whatever it makes up, fit or unfit, is answered as described, and nothing dies."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

DESCRIBED = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
BODIES = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
READS = ["/v1/models", "/v1/models/{name}", "/health", "/live", "/ready", "/version", "/metrics"]
EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.fixture
def described(server: Any, canary: None) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", server.app)


def refused(context: Any, response: Any, case: Any) -> Any:
    """A body that is unfit and too large may be refused for its size."""
    return None if response.status_code == 413 else negative_data_rejection(context, response, case)


def check(server: Any, case: Any, checks: list[Any]) -> None:
    response = case.call()
    case.validate_response(response, checks=checks)
    assert server.engine.running == set()


@pytest.mark.parametrize("path", BODIES)
@EXAMPLES
@given(data=st.data())
def test_bodies_that_fit_the_description(server: Any, described: Any, path: str, data: st.DataObject) -> None:
    case = data.draw(described[path]["POST"].as_strategy(generation_mode=GenerationMode.POSITIVE))
    case.body.pop("model", None)  # it would hardly ever guess the name
    if data.draw(st.booleans()):
        case.body["stream"] = True
    check(server, case, DESCRIBED)


@pytest.mark.parametrize("path", BODIES)
@EXAMPLES
@given(data=st.data())
def test_bodies_that_do_not_fit_are_refused(server: Any, described: Any, path: str, data: st.DataObject) -> None:
    case = data.draw(described[path]["POST"].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    check(server, case, [*DESCRIBED, refused])


@pytest.mark.parametrize("path", READS)
@settings(EXAMPLES, max_examples=10)
@given(data=st.data())
def test_what_is_read_is_as_described(server: Any, described: Any, path: str, data: st.DataObject) -> None:
    check(server, data.draw(described[path]["GET"].as_strategy()), DESCRIBED)


def test_every_route_is_described(server: Any) -> None:
    document = server.get("/openapi.json").json()
    assert set(document["paths"]) == {*BODIES, *READS}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert method == ("post" if path in BODIES else "get")
            assert "200" in operation["responses"]
    schema = document["components"]["schemas"]["ChatCompletionRequest"]
    assert {"messages", "temperature", "stream", "chat_template", "min_p"} <= set(schema["properties"])
    assert server.get("/docs").status_code == 404


def test_control_a_route_that_answers_otherwise_is_found(server: Any, described: Any) -> None:
    document = server.get("/openapi.json").json()
    document["components"]["schemas"]["Version"]["properties"]["version"] = {"type": "integer"}
    other = schemathesis.openapi.from_dict(document)
    case = other["/version"]["GET"].Case()
    with pytest.raises(BaseExceptionGroup):
        case.validate_response(server.get("/version"), checks=DESCRIBED)
