"""RequestTracer: spans that a real collector gets; and that nobody waits for a collector that is not there."""

import importlib.util
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from octavo.errors import ConfigError
from octavo.metrics import RequestTracer
from octavo.types import FinishedRequest, RequestMetrics, SamplingParams
from tests.metrics.collector import Collector, attributes, collecting

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def finished(parent: object = None, error: str | None = None, **times: float) -> FinishedRequest:
    now = time.monotonic()
    seconds = {"arrival_time": 8, "queued_time": 7.5, "scheduled_time": 6, "first_token_time": 4, "last_token_time": 1}
    return FinishedRequest(
        request_id="cmpl-1",
        params=SamplingParams(n=2, temperature=0.5, top_p=0.25, max_tokens=64),
        times=RequestMetrics(**({name: now - ago for name, ago in seconds.items()} | times)),
        num_prompt_tokens=7,
        num_generation_tokens=[3, 5],
        finish_reasons=["stop", "length"],
        error=error,
        trace_parent=parent,
        now=now,
    )


def test_a_request_is_a_span_with_vllm_attributes_and_its_phases_as_children(collector: Collector) -> None:
    tracer = RequestTracer(collector.endpoint, "m")
    tracer.on_request_finished(finished())
    spans = {span.name: span for span in collector.wait(4)}
    tracer.close()
    request = spans["llm_request"]
    assert not request.parent_span_id
    assert request.kind == request.SPAN_KIND_SERVER
    assert attributes(request) == {
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["stop", "length"],
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.n": 2,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.latency.e2e": pytest.approx(8),
        "gen_ai.latency.time_in_queue": pytest.approx(1.5),
        "gen_ai.latency.time_to_first_token": pytest.approx(4),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(2),
        "gen_ai.latency.time_in_model_decode": pytest.approx(3),
        "gen_ai.latency.time_in_model_inference": pytest.approx(5),
    }
    seconds = {}
    for name in ("queue", "prefill", "decode"):
        child = spans[name]
        assert (child.trace_id, child.parent_span_id) == (request.trace_id, request.span_id)
        seconds[name] = (child.end_time_unix_nano - child.start_time_unix_nano) / 1e9
        assert request.start_time_unix_nano <= child.start_time_unix_nano
        assert child.end_time_unix_nano <= request.end_time_unix_nano
    assert seconds == {"queue": pytest.approx(1.5), "prefill": pytest.approx(2), "decode": pytest.approx(3)}
    assert request.end_time_unix_nano / 1e9 == pytest.approx(time.time(), abs=30)  # of the clock on the wall
    assert collector.resources[0]["service.name"] == "octavo"


def test_a_request_that_never_ran_has_no_phases_and_tells_why(collector: Collector) -> None:
    tracer = RequestTracer(collector.endpoint, "m")
    never = {"scheduled_time": 0.0, "first_token_time": 0.0, "last_token_time": 0.0}
    tracer.on_request_finished(finished(error="the queue is full", **never))
    tracer.close()  # sends what is left
    (span,) = collector.wait(1)
    assert (span.status.code, span.status.message) == (span.status.STATUS_CODE_ERROR, "the queue is full")
    assert {name for name in attributes(span) if name.startswith("gen_ai.latency")} == {"gen_ai.latency.e2e"}


@pytest.mark.parametrize(("flags", "num_spans"), [("01", 4), ("00", 0)])
def test_a_trace_that_came_with_the_request_is_continued_as_its_sender_decided(
    collector: Collector, flags: str, num_spans: int
) -> None:
    from opentelemetry import context

    tracer = RequestTracer(collector.endpoint, "m")
    token = context.attach(context.Context())
    try:
        tracer.continue_trace({"traceparent": TRACEPARENT[:-2] + flags})
        parent = tracer.current_parent()
    finally:
        context.detach(token)
    tracer.on_request_finished(finished(parent))
    tracer.close()
    assert len(collector.spans) == num_spans
    for span in collector.spans:
        assert span.trace_id.hex() == TRACEPARENT.split("-")[1]
        if span.name == "llm_request":
            assert span.parent_span_id.hex() == TRACEPARENT.split("-")[2]


def test_a_collector_that_refuses_costs_one_line(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "20")
    collector.status = 400
    tracer = RequestTracer(collector.endpoint, "m")
    for _ in range(4):
        for _ in range(100):
            tracer.on_request_finished(finished())
        time.sleep(0.1)
    collector.status = 200
    deadline = time.monotonic() + 20
    while not collector.spans:
        tracer.on_request_finished(finished())
        assert time.monotonic() < deadline
        time.sleep(0.02)
    tracer.close()
    lines = [(record.levelname, record.message) for record in caplog.records if "Queue full" not in record.message]
    assert [level for level, _ in lines] == ["WARNING", "INFO"]
    assert "traces cannot be sent" in lines[0][1]
    assert "again" in lines[1][1]
    assert len([record for record in caplog.records if "Queue full" in record.message]) <= 1


def test_nobody_waits_for_a_collector_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "60")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = RequestTracer(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", "m")
        started = time.monotonic()
        for _ in range(300):  # more than the queue holds
            tracer.on_request_finished(finished())
        tracer.close()
        assert time.monotonic() - started < 20  # the exporter, if it were waited for, would take sixty


def test_grpc_is_the_protocol_that_nobody_has_to_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    received: list[Any] = []

    class Servicer(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: N802 (the base class's name)
            received.append(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        tracer = RequestTracer(f"http://127.0.0.1:{port}", "m")
        tracer.on_request_finished(finished())
        deadline = time.monotonic() + 20
        while not received:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        tracer.close()
    finally:
        server.stop(None).wait()
    names = {span.name for scope in received[0].resource_spans[0].scope_spans for span in scope.spans}
    assert names <= {"llm_request", "queue", "prefill", "decode"}


def test_what_cannot_work_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be an address such as http"):
        RequestTracer("localhost:4318", "m")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be grpc or http/protobuf"):
        RequestTracer("http://localhost:4318/v1/traces", "m")


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint.*pip install 'octavo\[otel\]'"):
        RequestTracer("http://localhost:4318/v1/traces", "m")
