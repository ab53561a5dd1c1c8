"""--otlp-traces-endpoint, from a request's headers to what a collector gets."""

from pathlib import Path

import httpx
import pytest

from tests.entrypoints.live import LiveServer
from tests.metrics.collector import attributes, collecting

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_trace_goes_through_the_server(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with collecting() as collector:
        server = LiveServer(tiny_llama_dir, otlp_traces_endpoint=collector.endpoint)
        try:
            body = {"model": "tiny", "prompt": ["Once", "upon a time"], "max_tokens": 5, "ignore_eos": True}
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
            answer = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60).json()
            strange = httpx.post(server.url + "/v1/completions", json=body | {"prompt": "a", "n": 2}, timeout=60).json()
            spans = collector.wait(3 * 4)
        finally:
            server.stop()
    requests = [span for span in spans if span.name == "llm_request"]
    ours = [span for span in requests if span.trace_id.hex() == TRACE_ID]
    assert [span.parent_span_id.hex() for span in ours] == [PARENT_ID, PARENT_ID]  # one for each prompt
    told = [attributes(span) for span in ours]
    assert sum(each["gen_ai.usage.prompt_tokens"] for each in told) == answer["usage"]["prompt_tokens"]
    assert sum(each["gen_ai.usage.completion_tokens"] for each in told) == answer["usage"]["completion_tokens"] == 10
    assert all(each["gen_ai.request.id"].startswith(answer["id"]) for each in told)
    (other,) = [span for span in requests if span.trace_id.hex() != TRACE_ID]
    assert not other.parent_span_id
    assert attributes(other)["gen_ai.usage.completion_tokens"] == strange["usage"]["completion_tokens"] == 10
    assert attributes(other)["gen_ai.response.finish_reasons"] == ["length", "length"]
    for span in requests:
        children = [child.name for child in spans if child.parent_span_id == span.span_id]
        assert sorted(children) == ["decode", "prefill", "queue"]
