"""An OpenTelemetry collector in this process: takes what is exported over HTTP, as protobuf."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["Collector", "collecting"]


class Collector:
    """Attributes:

    endpoint: where it listens.
    resources: attributes of the processes that sent.
    spans: what came, as ``opentelemetry.proto`` has it.
    status: what it answers; 200, or it fails.
    """

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self.resources: list[dict[str, Any]] = []
        self.spans: list[Any] = []
        self.status = 200
        self._came = threading.Condition()

    def take(self, body: bytes) -> None:
        with self._came:
            for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(attributes(resource_spans.resource))
                self.spans += [span for scope in resource_spans.scope_spans for span in scope.spans]
            self._came.notify_all()

    def wait(self, num_spans: int) -> list[Any]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.spans) >= num_spans, timeout=20)
            return list(self.spans)


def attributes(owner: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {entry.key: plain(entry.value) for entry in owner.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.status == 200:
                collector.take(body)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
