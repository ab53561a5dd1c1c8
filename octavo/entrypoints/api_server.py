"""The app: routes, and what each may answer. Knows nothing of sockets, signals and processes."""

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import octavo
from octavo.entrypoints.access import bound_priority, with_access
from octavo.entrypoints.answer_response import CLIENT_CLOSED_REQUEST, AnswerResponse
from octavo.entrypoints.body_refusal import BodyRefusal
from octavo.entrypoints.direct_routes import DirectRoutes, Handler
from octavo.entrypoints.errors import PayloadTooLargeError, UnavailableError, on_error
from octavo.entrypoints.http_counting import HttpCounting, route_paths
from octavo.entrypoints.ignored_fields import remarks, unknown_fields
from octavo.entrypoints.openai import Answer, ChatCompletionRequest, CompletionRequest, RequestBody
from octavo.entrypoints.openai.responses import encode
from octavo.entrypoints.openapi import describe
from octavo.entrypoints.request_body import read_request
from octavo.entrypoints.request_ids import checked_request_id, request_id_of
from octavo.entrypoints.server_state import ServerState
from octavo.errors import OctavoError
from octavo.metrics import CONTENT_TYPE, HttpMetrics

__all__ = ["build_app"]

_Request = TypeVar("_Request", bound=RequestBody)


def build_app(state: ServerState) -> HttpCounting:
    """The app over one server's state, behind all that its config says of who may use it, and counted.

    Raises:
        ConfigError: see with_access.
    """
    access = state.config.access
    app = _routes(state)
    routes = route_paths(app.routes)
    http_metrics = HttpMetrics(routes, state.metrics_folder)
    _add_metrics(app, state, http_metrics)
    root_path = access.root_path or ""
    direct = DirectRoutes(app, _generation(state), root_path)
    guarded, state.refresh_access = with_access(direct, access, state.shared_dir)
    return HttpCounting(guarded, routes, http_metrics, root_path)


def _routes(state: ServerState) -> FastAPI:
    app = FastAPI(title="octavo", version=octavo.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.root_path = state.config.access.root_path or ""
    for kind in (HTTPException, OctavoError, Exception):
        app.add_exception_handler(kind, on_error)
    _add_probes(app, state)
    _add_models(app, state)
    for path, handler in _generation(state).items():  # for /openapi.json, and for other methods
        app.add_api_route(path, handler, methods=["POST"], response_class=Response)
    _add_tokenization(app, state)
    app.openapi = functools.cache(lambda: describe(app))  # type: ignore[method-assign]
    return app


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, media_type="application/json")


def _add_probes(app: FastAPI, state: ServerState) -> None:
    for path, probe in (("/health", state.probes.health), ("/ready", state.probes.ready), ("/live", state.probes.live)):
        _add_probe(app, path, probe)

    @app.get("/version", response_class=Response)
    async def version() -> Response:
        return _json({"version": octavo.__version__})


def _add_metrics(app: FastAPI, state: ServerState, http_metrics: HttpMetrics) -> None:
    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        if state.services is None:
            raise UnavailableError("the model is still loading; there is nothing to measure yet")
        engine = state.services.engine.metrics
        return Response(engine.render() + http_metrics.render(), media_type=CONTENT_TYPE)


def _add_probe(app: FastAPI, path: str, probe: Callable[[], tuple[int, dict[str, Any]]]) -> None:
    async def tell() -> Response:
        status, body = probe()
        return _json(body, status)

    app.add_api_route(path, tell, methods=["GET"], name=path[1:], description=probe.__doc__, response_class=Response)
    app.add_api_route(path, tell, methods=["HEAD"], include_in_schema=False)


def _add_models(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/models", response_class=Response)
    async def list_models() -> Response:
        return _json(state.serving().models.list())

    @app.get("/v1/models/{name:path}", response_class=Response)
    async def retrieve_model(name: str) -> Response:
        return _json(state.serving().models.card(name))


def _generation(state: ServerState) -> dict[str, Handler]:
    async def create_completion(request: Request) -> Response:
        return await _answer(state, request, state.serving().completion)

    async def create_chat_completion(request: Request) -> Response:
        return await _answer(state, request, state.serving().chat)

    return {"/v1/completions": create_completion, "/v1/chat/completions": create_chat_completion}


def _add_tokenization(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize", response_class=Response)
    async def tokenize(request: Request) -> Response:
        return await _answer(state, request, state.serving().tokenization)

    if state.config.http.enable_tokenizer_info_endpoint:

        @app.get("/tokenizer_info", response_class=Response)
        async def tokenizer_info() -> Response:
            return _json(await state.serving().tokenization.info())

    @app.post("/detokenize", response_class=Response)
    async def detokenize(request: Request) -> Response:
        return await _answer(state, request, state.serving().detokenization)


class _Serving(Protocol[_Request]):
    """What a route that takes a body needs."""

    id_prefix: str

    def parse(self, body: dict[str, Any], /) -> _Request: ...

    async def create(self, request: _Request, request_id: str, arrival_time: float, /) -> Answer: ...


async def _answer(state: ServerState, request: Request, serving: _Serving[_Request]) -> Response:
    arrival_time = time.monotonic()
    name = request_id_of(request.scope)
    state.continue_trace(request.headers)
    try:
        asked = await read_request(request, state.body_memory, serving.parse)
        if isinstance(asked, ChatCompletionRequest | CompletionRequest):
            asked.priority = bound_priority(request.scope, asked.priority)
        ignored = asked.ignored_fields()
        if ignored and state.config.answer.strict_requests:
            raise unknown_fields(ignored)
        if asked.request_id is not None:
            name = request.state.request_id = checked_request_id(asked.request_id)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except PayloadTooLargeError as error:
        return BodyRefusal(error, [(b"x-request-id", name.encode())])
    create = functools.partial(serving.create, asked, serving.id_prefix + name, arrival_time)
    return AnswerResponse(create, state.active, functools.partial(_answer_headers, name, ignored))


def _answer_headers(name: str, ignored: list[str], answer: Answer) -> dict[str, str]:
    return {"x-request-id": name} | remarks(ignored, answer)
