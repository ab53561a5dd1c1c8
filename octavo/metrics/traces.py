"""OpenTelemetry traces: one ``llm_request`` span a request with vLLM's attributes, and what it was made of as children.

Spans are made when a request has ended, from its times. They wait in a bounded queue for a thread that sends them; a
collector that is away costs spans, and one line in the log.
"""

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError
from octavo.logging import init_logger
from octavo.types import FinishedRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

__all__ = ["RequestTracer"]

logger = init_logger(__name__)

_MODULES = (
    "opentelemetry.sdk.trace",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
)
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
# How long the last spans may take to be sent when the server ends.
_LAST_SECONDS = 1.0


class RequestTracer:
    """Makes and sends spans. What the standard's ``OTEL_*`` environment variables set is kept: service name, sampler,
    headers, certificates, queue and batch sizes.

    Args:
        endpoint: the collector's address, as its protocol has it: ``http://host:4317`` for gRPC,
            ``http://host:4318/v1/traces`` for http/protobuf.
        model_name: the first served name.

    Raises:
        ConfigError: the packages are not installed, or the protocol is unknown.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        exporter = _make_exporter(endpoint)
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        attributes = {"process.pid": os.getpid()} | ({} if named else {"service.name": "octavo"})
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._exporter = _QuietExporter(exporter, endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))  # type: ignore[arg-type]
        self._tracer = self._provider.get_tracer("octavo")
        self._model_name = model_name

    def continue_trace(self, headers: Mapping[str, str]) -> None:
        """From here on, requests of the current task belong to the span that a request's headers name (W3C)."""
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context.attach(TraceContextTextMapPropagator().extract(headers))

    def current_parent(self) -> Any:
        """What a request that starts now belongs to."""
        from opentelemetry import context

        return context.get_current()

    def on_request_finished(self, finished: FinishedRequest) -> None:
        """Makes the spans of a request."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        # All times are of the monotonic clock.
        to_epoch = time.time() - time.monotonic()

        def nanoseconds(seconds: float) -> int:
            return round((seconds + to_epoch) * 1e9)

        times = finished.times
        span = self._tracer.start_span(
            "llm_request",
            finished.trace_parent,
            SpanKind.SERVER,
            _attributes(finished, self._model_name),
            start_time=nanoseconds(times.arrival_time),
        )
        children = set_span_in_context(span)
        phases = (
            ("queue", times.queued_time, times.scheduled_time),
            ("prefill", times.scheduled_time, times.first_token_time),
            ("decode", times.first_token_time, times.last_token_time),
        )
        for name, began, ended in phases:
            if began and ended:
                child = self._tracer.start_span(name, children, start_time=nanoseconds(began))
                child.end(nanoseconds(ended))
        if finished.error is not None:
            span.set_status(Status(StatusCode.ERROR, finished.error))
        span.end(nanoseconds(finished.now))

    def close(self) -> None:
        """Sends what is left, for a moment; then there is silence, whatever becomes of the rest."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(_LAST_SECONDS)
        self._exporter.is_closed = True


def _make_exporter(endpoint: str) -> "SpanExporter":
    if not all(_is_installed(module) for module in _MODULES):
        raise ConfigError("--otlp-traces-endpoint needs packages that are not installed: pip install 'octavo[otel]'")
    protocol = os.environ.get(_PROTOCOL, "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter(endpoint, insecure=True)  # but for https://, which stays secure
    if protocol == "http/protobuf":
        if not endpoint.startswith(("http://", "https://")):
            wanted = "an address such as http://localhost:4318/v1/traces for http/protobuf"
            raise ConfigError(f"--otlp-traces-endpoint must be {wanted}; got {endpoint!r}")
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        return http.OTLPSpanExporter(endpoint)
    raise ConfigError(f"{_PROTOCOL} must be grpc or http/protobuf; got {protocol!r}")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _attributes(finished: FinishedRequest, model_name: str) -> dict[str, Any]:
    """Under vLLM's names. What has not happened, or was not asked for, is left out."""
    times, params = finished.times, finished.params
    found = {
        "gen_ai.request.id": finished.request_id,
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": finished.finish_reasons,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": len(finished.finish_reasons),
        "gen_ai.usage.prompt_tokens": finished.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(finished.num_generation_tokens),
        "gen_ai.latency.e2e": finished.now - times.arrival_time,
    }
    if times.scheduled_time:
        found["gen_ai.latency.time_in_queue"] = times.scheduled_time - times.queued_time
    if times.first_token_time:
        found["gen_ai.latency.time_to_first_token"] = times.first_token_time - times.arrival_time
        found["gen_ai.latency.time_in_model_prefill"] = times.first_token_time - times.scheduled_time
        found["gen_ai.latency.time_in_model_decode"] = times.last_token_time - times.first_token_time
        found["gen_ai.latency.time_in_model_inference"] = times.last_token_time - times.scheduled_time
    return found


class _Once(logging.Filter):
    """Each line once in the life of the process: that the queue is full can be said of every request."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        new = record.msg not in self._said
        self._said.add(record.msg)
        return new


class _QuietExporter:
    """An exporter whose troubles are told once: when they begin and when they have gone. The library's own lines, one
    a try, are not."""

    def __init__(self, exporter: "SpanExporter", endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._failing = False
        self.is_closed = False
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        logging.getLogger("opentelemetry.sdk._shared_internal").addFilter(_Once())

    def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
        result = self._exporter.export(spans)
        failed = result.name != "SUCCESS"
        if self.is_closed:
            return result
        if failed and not self._failing:
            logger.warning("traces cannot be sent to %s; they are lost until it answers", self._endpoint)
        elif self._failing and not failed:
            logger.info("traces are being sent to %s again", self._endpoint)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)
