"""/metrics of a live server: what docs/metrics.md says is there, and nothing else; and the numbers are those of the
traffic."""

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.config import AccessConfig
from tests.entrypoints.conftest import Server
from tests.entrypoints.live import LiveServer
from tests.faults import server_process

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
ENGINE_LABELS = frozenset(("model_name", "engine"))


class Series(NamedTuple):
    type: str
    labels: frozenset[str]


def documented(text: str) -> dict[str, Series]:
    """The rows of the tables of series."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 7 and cells[1].startswith("`"):
            named = frozenset(re.findall(r"`(\w+)`", cells[3]))
            labels = named if cells[3].startswith("only") else named | ENGINE_LABELS
            found[cells[1].strip("`")] = Series(cells[2], labels)
    return found


def published(text: str) -> dict[str, Series]:
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        name = family.name + ("_total" if family.type == "counter" else "")
        (labels,) = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        found[name] = Series(family.type, labels)
    return found


class Numbers:
    """A scrape, as differences from an earlier one."""

    def __init__(self, server: LiveServer, before: "Numbers | None" = None) -> None:
        self.text = httpx.get(server.url + "/metrics").text
        self._values = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
        }
        self._before = before

    def __call__(self, name: str, *label_values: str) -> float:
        """``label_values``: beside those of the engine."""
        key = (
            name,
            *sorted((*label_values, "0", "tiny") if not name.startswith(("http", "octavo:http")) else label_values),
        )
        return self._values.get(key, 0.0) - (0.0 if self._before is None else self._before._values.get(key, 0.0))


def test_the_documentation_and_a_live_agree(live: LiveServer, client: openai.OpenAI) -> None:
    client.completions.create(model="tiny", prompt="hello", max_tokens=2)
    told, seen = documented(DOCUMENT.read_text()), published(httpx.get(live.url + "/metrics").text)
    assert seen.keys() - told.keys() == set(), "published and not documented"
    assert told.keys() - seen.keys() == set(), "documented and not published"
    assert {name: series for name, series in seen.items() if series != told[name]} == {}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("`vllm:num_requests_running`", "`vllm:num_running`"),
        ("`octavo:step_duration_seconds` | histogram", "`octavo:step_duration_seconds` | gauge"),
        ("only `code`", "only `status`"),
    ],
)
def test_a_table_that_is_wrong_is_seen(right: str, wrong: str) -> None:
    text = DOCUMENT.read_text()
    assert right in text
    assert documented(text.replace(right, wrong)) != documented(text)


def test_numbers_are_those_of_the_traffic(live: LiveServer, client: openai.OpenAI) -> None:
    live.check_idle()
    before = Numbers(live)
    started = time.monotonic()
    usages = [
        client.completions.create(
            model="tiny",
            prompt="Once upon a time there was a server",
            max_tokens=9,
            n=n,
            extra_body={"ignore_eos": True},
        ).usage
        for n in (1, 1, 2)
    ]
    stream = client.completions.create(
        model="tiny",
        prompt="The quick brown fox",
        max_tokens=7,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    usages += [chunk.usage for chunk in stream if chunk.usage is not None]
    elapsed = time.monotonic() - started
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="hello", max_tokens=10**6)
    live.check_idle()
    numbers = Numbers(live, before)

    assert numbers("vllm:prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages if usage)
    assert numbers("vllm:generation_tokens_total") == sum(usage.completion_tokens for usage in usages if usage) == 43
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages if usage)  # type: ignore[union-attr, misc]
    assert numbers("vllm:prompt_tokens_cached_total") == cached
    assert numbers("vllm:prompt_tokens_by_source_total", "local_cache_hit") == cached
    computed = numbers("vllm:prompt_tokens_by_source_total", "local_compute")
    assert computed + cached == numbers("vllm:prompt_tokens_total")
    assert numbers("vllm:prefix_cache_hits_total") == numbers("vllm:prompt_tokens_cached_by_source_total", "device")

    # Five sequences of four requests.
    assert numbers("vllm:request_success_total", "length") == 5
    assert numbers("vllm:request_success_total", "error") == numbers("vllm:request_success_total", "abort") == 0
    for name in ("generation_tokens", "prompt_tokens", "num_preemptions", "queue_time_seconds", "params_max_tokens"):
        assert numbers(f"vllm:request_{name}_count") == 5, name
    assert numbers("vllm:request_params_n_count") == numbers("vllm:request_max_num_generation_tokens_count") == 4
    assert numbers("vllm:request_params_n_sum") == 5
    assert numbers("vllm:request_max_num_generation_tokens_sum") == 9 + 9 + 9 + 7
    assert numbers("vllm:request_generation_tokens_sum") == 43
    assert numbers("vllm:time_to_first_token_seconds_count") == 5
    assert numbers("vllm:inter_token_latency_seconds_count") == 43 - 5

    seconds = {
        phase: numbers(f"vllm:request_{phase}_time_seconds_sum")
        for phase in ("queue", "prefill", "decode", "inference")
    }
    assert seconds["prefill"] + seconds["decode"] == pytest.approx(seconds["inference"])
    assert numbers("vllm:inter_token_latency_seconds_sum") == pytest.approx(seconds["decode"])
    assert seconds["queue"] + seconds["inference"] < numbers("vllm:e2e_request_latency_seconds_sum") < 5 * elapsed
    # Each token was computed in one step, prompts in those that had not found them in the cache.
    assert 0 < numbers("octavo:step_duration_seconds_sum") < elapsed
    assert numbers("octavo:step_duration_seconds_count") == numbers("vllm:iteration_tokens_total_count")

    assert numbers("http_requests_total", "POST", "2xx", "/v1/completions") == 4
    assert numbers("http_requests_total", "POST", "4xx", "/v1/completions") == 1
    assert (numbers("octavo:http_responses_total", "200"), numbers("octavo:http_responses_total", "400")) == (4, 1)
    assert numbers("http_request_duration_seconds_count", "POST", "/v1/completions") == 5
    assert 0 < numbers("http_request_duration_seconds_sum", "POST", "/v1/completions") < 2 * elapsed


def test_a_client_that_leaves_is_an_abort_and_a_disconnect(live: LiveServer, client: openai.OpenAI) -> None:
    before = Numbers(live)
    stream = client.completions.create(
        model="tiny", prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    live.check_idle()
    deadline = time.monotonic() + 5
    while not (numbers := Numbers(live, before))("octavo:http_client_disconnects_total"):
        assert time.monotonic() < deadline
    assert numbers("octavo:http_client_disconnects_total") == 1
    assert numbers("vllm:request_success_total", "abort") == 1
    assert numbers("octavo:http_responses_total", "200") == 1  # its head had been sent


def test_requests_that_no_route_takes_are_counted_too(server: Server) -> None:
    assert server.get("/nowhere/x").status_code == 404
    assert server.get("/v1/completions").status_code == 405
    assert server.get("/v1/models/no/such").status_code == 404
    assert server.request("BREW", "/v1/models").status_code == 405
    server.get("/health")
    text = server.get("/metrics").text
    counted = [line for line in text.splitlines() if line.startswith("http_requests_total")]
    assert counted == [
        'http_requests_total{handler="/v1/completions",method="GET",status="4xx"} 1.0',
        'http_requests_total{handler="/v1/models",method="other",status="4xx"} 1.0',
        'http_requests_total{handler="/v1/models/{name:path}",method="GET",status="4xx"} 1.0',
        'http_requests_total{handler="none",method="GET",status="4xx"} 1.0',
    ]
    assert 'octavo:http_responses_total{code="404"} 2.0' in text
    assert 'octavo:http_responses_total{code="405"} 2.0' in text


def test_requests_that_are_refused_before_any_route_are_counted_with_their_path() -> None:
    server = Server(access=AccessConfig(api_key=["secret"], root_path="/behind"))
    key = {"authorization": "Bearer secret"}
    assert server.get("/behind/v1/models").status_code == 401
    assert server.get("/behind/v1/models", headers=key).status_code == 200
    assert server.get("/v1/models", headers=key).status_code == 200  # a proxy may have taken the prefix off
    text = server.get("/behind/metrics", headers=key).text
    assert 'http_requests_total{handler="/v1/models",method="GET",status="4xx"} 1.0' in text
    assert 'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 2.0' in text
    assert 'octavo:http_responses_total{code="401"} 1.0' in text
    assert "/metrics" not in text


def test_connections_that_the_http_server_refuses_are_counted(live: LiveServer) -> None:
    before = Numbers(live)
    with socket.create_connection(("127.0.0.1", httpx.URL(live.url).port or 0)) as client:
        client.sendall(b"no HTTP at all\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 400")
    numbers = Numbers(live, before)
    assert numbers("octavo:http_connections_refused_total", "400") == 1
    assert numbers("octavo:http_responses_total", "400") == 0


def test_any_front_end_tells_the_sum_over_all(tiny_llama_dir: Path) -> None:
    server = server_process.Server(
        str(tiny_llama_dir), "--api-server-count", "3", "--dtype", "float32", "--num-gpu-blocks-override", "64"
    )
    try:
        server.wait_ready()
        # No connection is kept: the system gives each to one of the three, whichever.
        bodies = [server.body(prompt=[5, 6, 7 + turn], max_tokens=3) for turn in range(24)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda body: server.http.post(f"{server.url}/v1/completions", json=body), bodies))
        assert all(answer.json()["usage"]["completion_tokens"] == 3 for answer in answers)
        assert server_process.wait_until(lambda: server.num_unfinished() == 0)
        texts = [server.http.get(f"{server.url}/metrics").text for _ in range(12)]
        for text in texts:
            lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
            values = {name: float(value) for name, _, value in lines}
            of = 'engine="0",model_name="' + answers[0].json()["model"] + '"'
            assert values[f"vllm:generation_tokens_total{{{of}}}"] == 72
            assert values[f"vllm:prompt_tokens_total{{{of}}}"] == 72
            assert values[f"vllm:time_to_first_token_seconds_count{{{of}}}"] == 24
            assert values[f"vllm:iteration_tokens_total_count{{{of}}}"] >= 3
            assert values[f"vllm:num_requests_running{{{of}}}"] == 0
            assert values['http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'] == 24
        told = documented(DOCUMENT.read_text())
        assert published(texts[0]) == told
    finally:
        server.close()
