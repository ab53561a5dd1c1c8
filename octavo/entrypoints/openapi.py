"""/openapi.json: every route with its bodies, made from the types that the routes read and write."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from octavo.entrypoints.errors import ErrorInfo
from octavo.entrypoints.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from octavo.entrypoints.openai.responses import (
    ChatCompletion,
    Completion,
    Detokenized,
    ModelCard,
    ModelList,
    Tokenized,
)
from octavo.types import MAX_CHOICES

__all__ = ["describe"]

_REF = "#/components/schemas/{name}"


class Health(msgspec.Struct, omit_defaults=True):
    """``stage`` and ``progress`` while loading; ``cause`` where the engine is dead, overdue or stuck."""

    status: str
    stage: str = ""
    progress: float = 0.0
    cause: str = ""


class Version(msgspec.Struct):
    version: str


class ErrorBody(msgspec.Struct):
    """What every mistake and failure is told in."""

    error: ErrorInfo


# Route → request bodies (any of them), what a good answer is, and whether it may be a stream of events.
_BODIES: dict[str, tuple[list[type[BaseModel]], type, bool]] = {
    "/v1/completions": ([CompletionRequest], Completion, True),
    "/v1/chat/completions": ([ChatCompletionRequest], ChatCompletion, True),
    "/tokenize": ([TokenizeCompletionRequest, TokenizeChatRequest], Tokenized, False),
    "/detokenize": ([DetokenizeRequest], Detokenized, False),
}
_READS: dict[str, type] = {
    "/v1/models": ModelList,
    "/v1/models/{name}": ModelCard,
    "/health": Health,
    "/ready": Health,
    "/live": Health,
    "/version": Version,
}
# Probe → when it is not well.
_UNWELL = {
    "/health": "The model is loading, or the engine is dead.",
    "/ready": "No requests should be sent: the model is loading, the server ends, or the engine is overdue or dead.",
    "/live": "The server should be started anew: the engine is dead, or stuck in a step.",
}
_IDS = {"items": {"type": "integer", "minimum": 0}}
_INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
_TEXT = {"type": "string", "minLength": 1}
# What SamplingParams and the engine check, said to clients: field → bounds on each type that it may have.
_BOUNDS: dict[str, dict[str, dict[str, Any]]] = {
    "n": {"integer": {"minimum": 1, "maximum": MAX_CHOICES}},
    "presence_penalty": {"number": {"minimum": -2, "maximum": 2}},
    "frequency_penalty": {"number": {"minimum": -2, "maximum": 2}},
    "repetition_penalty": {"number": {"exclusiveMinimum": 0, "maximum": 1000}},
    "temperature": {"number": {"minimum": 0, "maximum": 2}},
    "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
    "top_k": {"integer": {"minimum": -1}},
    "min_p": {"number": {"minimum": 0, "maximum": 1}},
    "seed": {"integer": _INT64},
    "logit_bias": {"object": {"additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}},
    "allowed_token_ids": {"array": {"minItems": 1, **_IDS}},
    "bad_words": {"array": {"maxItems": 128, "items": _TEXT | {"maxLength": 1024}}},
    "stop": {"array": {"maxItems": 4, "items": _TEXT}, "string": {"minLength": 1}},
    "stop_token_ids": {"array": _IDS},
    "logprob_token_ids": {"array": _IDS},
    "max_tokens": {"integer": {"minimum": 0}},
    "max_completion_tokens": {"integer": {"minimum": 1}},
    "min_tokens": {"integer": {"minimum": 0}},
    "logprobs": {"integer": {"minimum": -1}},
    "top_logprobs": {"integer": {"minimum": -1}},
    "prompt_logprobs": {"integer": {"minimum": -1}},
    "truncate_prompt_tokens": {"integer": {"minimum": -1}},
    "best_of": {"integer": {"minimum": 1}},
    "priority": {"integer": _INT64},
    "cache_salt": {"string": {"pattern": "^[A-Za-z0-9._:-]{1,128}$"}},
    "request_id": {"string": {"pattern": "^[!-~]{1,128}$"}},
    "tokens": {"array": {"minItems": 1, **_IDS}},
    "messages": {"array": {"minItems": 1, "items": {"$ref": _REF.format(name="Message")}}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": _TEXT,
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"$ref": _REF.format(name="TextPart")}},
            ]
        },
    },
}
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_PROMPT = {
    "anyOf": [
        _TEXT,
        {"type": "array", "minItems": 1, "items": _TEXT},
        {"type": "array", "minItems": 1, **_IDS},
        {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, **_IDS}},
    ]
}
_STREAM = "With stream: true. The data of each event is a chunk of the answer as JSON, that of the last is [DONE]."
_ERRORS = {
    400: "The request is wrong; error.param names the field.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The API key has used up its limits for now.",
    500: "The request could not be finished, or the server failed.",
    503: "The model is loading, or the server is going down or overloaded.",
}
_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_UNAUTHORIZED = {
    "description": "The server has API keys, and the request brings none of them.",
    "content": {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}},
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document for an app's routes."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    paths: dict[str, Any] = document["paths"]
    for path in list(paths):  # "{name:path}" is the router's way of writing it
        paths[path.replace(":path}", "}")] = paths.pop(path)
    for path, (bodies, answer, streams) in _BODIES.items():
        route = paths[path]["post"]
        refs = [{"$ref": _REF.format(name=body.__name__)} for body in bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        route["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        content = _json_content(answer)
        if streams:
            content["text/event-stream"] = {"schema": {"description": _STREAM}}
        route["responses"] = {"200": {"description": "The answer.", "content": content}} | _errors(*_ERRORS)
    for path, answer in _READS.items():
        codes = (404, 500, 503) if path.startswith("/v1/models") else (500,)
        good = {"200": {"description": "The answer.", "content": _json_content(answer)}}
        paths[path]["get"]["responses"] = good | _errors(*codes)
    for path, meaning in _UNWELL.items():
        paths[path]["get"]["responses"]["503"] = {"description": meaning, "content": _json_content(Health)}
    text = {"description": "Prometheus's text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    paths["/metrics"]["get"]["responses"] = {"200": text} | _errors(500, 503)
    _describe_keys(document)
    return document


def _describe_keys(document: dict[str, Any]) -> None:
    """A server may have API keys, which are to be brought to all but its probes."""
    document["security"] = [*({name: []} for name in _KEY_SCHEMES), {}]
    document["components"] = {"schemas": _schemas(), "securitySchemes": _KEY_SCHEMES}
    for path, methods in document["paths"].items():
        for route in methods.values():
            if path in _UNWELL:
                route["security"] = []
            else:
                route["responses"]["401"] = _UNAUTHORIZED


def _json_content(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}


def _errors(*codes: int) -> dict[str, Any]:
    return {str(code): {"description": _ERRORS[code], "content": _json_content(ErrorBody)} for code in codes}


def _schemas() -> dict[str, Any]:
    """Of all bodies, by name."""
    requests = [(body, "validation") for bodies, _, _ in _BODIES.values() for body in bodies]
    _, of_requests = models_json_schema(requests, ref_template=_REF.replace("{name}", "{model}"))  # type: ignore[arg-type]
    for schema in of_requests["$defs"].values():
        for name, field in schema["properties"].items():
            _bound(field, _BOUNDS.get(name, {}))
    completion = of_requests["$defs"][CompletionRequest.__name__]
    completion["properties"]["prompt"], completion["required"] = _PROMPT, ["prompt"]
    answers = [*(answer for _, answer, _ in _BODIES.values()), *_READS.values(), ErrorBody]
    _, of_answers = msgspec.json.schema_components(answers, ref_template=_REF)
    return {**of_requests["$defs"], **of_answers, "Message": _MESSAGE, "TextPart": _TEXT_PART}


def _bound(field: dict[str, Any], bounds: dict[str, dict[str, Any]]) -> None:
    """Adds the bounds to a field's schema, each to its type."""
    for branch in field.get("anyOf", [field]):
        branch.update(bounds.get(branch.get("type", ""), {}))
