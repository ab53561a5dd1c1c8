"""``octavo bench serve``: its flags, what it sends for them, and what comes out where."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.tokenizers import load_tokenizer
from tests.bench.scripted import Script, ScriptedServer, refusal, whole

Scripted = Callable[[Script], ScriptedServer]
Bench = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str], tiny_llama_dir: Path) -> Bench:
    """``bench(server, *flags)`` → (exit code, the result or None, standard error)."""

    def run(server: ScriptedServer | None, *flags: Any) -> tuple[int, Any, str]:
        words = ["bench", "serve", "--disable-tqdm", *map(str, flags)]
        if server is not None:
            words += ["--port", str(server.port)]
        if "--tokenizer" not in words:
            words += ["--tokenizer", str(tiny_llama_dir)]
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        assert len(out.splitlines()) <= 1
        return code, json.loads(out) if out else None, err

    return run


SMALL = ["--num-prompts", 4, "--random-input-len", 8, "--random-output-len", 3]


def test_a_run(scripted: Scripted, bench: Bench) -> None:
    server = scripted(lambda number, body: [0.3, *whole(body)])
    code, found, err = bench(server, *SMALL, "--ignore-eos", "--temperature", 0, "--max-concurrency", 2)
    assert code == 0
    assert (found["benchmark"], found["backend"], found["model_id"]) == ("serve", "openai", "served")
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (4, 0, 12)
    assert (found["input_len_mismatches"], found["output_len_mismatches"]) == (0, 0)
    assert (found["request_rate"], found["max_concurrency"], found["random_prompt_form"]) == ("inf", 2, "ids")
    assert {f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p99") for metric in ("ttft", "itl")} < set(
        found
    )
    assert "Output tokens/s" in err
    assert "WARNING" not in err
    path, _, body = server.requests[0]
    assert path == "/v1/completions"
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ("served", 3, True, 0)
    assert len(body["prompt"]) == 8


def test_chats_get_text_of_exact_length(scripted: Scripted, bench: Bench, tiny_llama_dir: Path) -> None:
    server = scripted(lambda number, body: refusal(400, {"error": "no"}))
    flags = ["--backend", "openai-chat", "--model", "m", "--served-model-name", "n", "--extra-body", '{"a": {"b": 1}}']
    code, found, err = bench(server, *SMALL, *flags)
    assert (code, found["completed"], found["error_counts"]) == (1, 0, {"http_400": 4})
    assert "WARNING: 4 requests failed" in err
    path, _, body = server.requests[0]
    assert (path, body["model"], body["a"]) == ("/v1/chat/completions", "n", {"b": 1})
    (message,) = body["messages"]
    assert len(load_tokenizer(tiny_llama_dir).encode(message["content"])) == 8


def test_the_key_headers_and_request_ids_are_sent(
    scripted: Scripted, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = scripted(lambda number, body: whole(body))
    bench(server, *SMALL, "--header", "X-Team=a=b", "--request-id-prefix", "mine-")
    headers = server.requests[0][1]
    assert (headers["authorization"], headers["x-team"]) == ("Bearer secret", "a=b")
    assert {each[1]["x-request-id"] for each in server.requests} == {f"mine-{number}" for number in range(4)}
    bench(server, *SMALL, "--header", "Authorization=Basic x")
    assert server.requests[-1][1]["authorization"] == "Basic x"


@pytest.mark.parametrize("url", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_an_address_may_have_the_apis_version_or_not(scripted: Scripted, bench: Bench, url: str) -> None:
    server = scripted(lambda number, body: whole(body))
    code, _, _ = bench(None, *SMALL, "--base-url", url.format(server.url))
    assert (code, server.requests[0][0]) == (0, "/v1/completions")


def test_results_are_written_where_they_are_wanted(scripted: Scripted, bench: Bench, tmp_path: Path) -> None:
    server = scripted(lambda number, body: whole(body))
    file = tmp_path / "out.json"
    flags = ["--output-json", file, "--save-result", "--save-detailed", "--result-dir", tmp_path]
    more = ["--label", "mine", "--metadata", "a=b", "c=d=e", "--request-rate", 200]
    _, found, _ = bench(server, *SMALL, *flags, *more)
    written = json.loads(file.read_text())
    (named,) = tmp_path.glob("mine-200qps-served-*.json")
    assert json.loads(named.read_text()) == written
    assert {name: written[name] for name in found} == found
    assert (found["a"], found["c"]) == ("b", "d=e")
    assert len(written["ttfts"]) == len(written["itls"]) == 4
    assert "ttfts" not in found
    bench(server, *SMALL, "--save-result", "--result-dir", tmp_path, "--result-filename", "x.json")
    assert "ttfts" not in json.loads((tmp_path / "x.json").read_text())


def test_percentiles_and_goodput_are_as_asked(scripted: Scripted, bench: Bench) -> None:
    server = scripted(lambda number, body: whole(body))
    flags = [
        "--percentile-metrics",
        "e2el,tpot",
        "--metric-percentiles",
        "50,99.5",
        "--goodput",
        "ttft:60000",
        "tpot:0",
    ]
    _, found, _ = bench(server, *SMALL, *flags)
    assert {"p50_e2el_ms", "p99.5_tpot_ms"} < set(found)
    assert "mean_ttft_ms" not in found
    assert found["request_goodput"] == 0


def test_the_server_is_watched_by_its_pid(scripted: Scripted, bench: Bench) -> None:
    server = scripted(lambda number, body: whole(body))
    _, found, err = bench(server, *SMALL, "--server-pid", os.getpid())
    assert found["server"]["processes"][0]["pid"] == os.getpid()
    assert found["server"]["pss_mb"] > 1
    assert "Server: memory, PSS (MB)" in err


def test_custom_prompts_are_sent_as_they_are(scripted: Scripted, bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "output_tokens": 2}\n{"prompt": [7, 8], "output_tokens": 1}\n')
    server = scripted(lambda number, body: whole(body))
    flags = ["--dataset-name", "custom", "--dataset-path", tmp_path / "p.jsonl", "--num-prompts", 2]
    code, _, _ = bench(server, *flags, "--custom-output-len", -1, "--tokenizer", "no/such")
    assert code == 0
    assert sorted((str(body["prompt"]), body["max_tokens"]) for *_, body in server.requests) == [
        ("[7, 8]", 1),
        ("one", 2),
    ]
    code, _, err = bench(server, *flags, "--backend", "openai-chat")
    assert code == 1
    assert "chats take text, not token ids" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--request-rate", "0"], "--request-rate: must be a number above 0, got '0'"),
        (["--burstiness", "x"], "--burstiness: must be a number above 0, got 'x'"),
        (["--max-concurrency", "0"], "--max-concurrency: must be a whole number of at least 1"),
        (["--random-range-ratio", "1"], "--random-range-ratio: must be a number in [0, 1)"),
        (["--random-range-ratio", '{"input": "a"}'], "--random-range-ratio: must be"),
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics: must be some of ttft,tpot,itl,e2el"),
        (["--metric-percentiles", "101"], "--metric-percentiles: must be numbers from 0 to 100"),
        (["--goodput", "itl:3"], "--goodput: must be ttft, tpot or e2el"),
        (["--extra-body", "[]"], "--extra-body: must be a JSON object"),
        (["--extra-body", '{"stream": false}'], "--extra-body: stream: a load generator"),
        (["--backend", "tgi"], "invalid choice: 'tgi'"),
        (["--custom-output-len", "-2"], "--custom-output-len"),
        (["--metadata", "a"], "--metadata: must be KEY=VALUE"),
        (["--max-model-len", "5"], "unrecognized arguments: --max-model-len 5"),
    ],
)
def test_wrong_flags_are_usage_errors(bench: Bench, flags: list[str], message: str) -> None:
    code, found, err = bench(None, *flags)
    assert (code, found) == (2, None)
    assert message in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--header", "a"], "--header a: expected KEY=VALUE"),
        (["--output-json", "/no/such/file"], "--output-json: there is no folder /no/such"),
        (["--result-dir", "/no/such"], "--result-dir: there is no folder /no/such"),
        (["--dataset-name", "custom", "--model", "m"], "needs --dataset-path"),
        (["--ramp-up-strategy", "linear"], "needs both"),
        (
            ["--model", "m", "--tokenizer", "no-such-thing"],
            "give --tokenizer (--tokenizer 'no-such-thing' is not there",
        ),
        (["--port", "1"], "127.0.0.1:1/v1/models: no connection to 127.0.0.1:1"),
    ],
)
def test_what_cannot_be_done_is_one_line(bench: Bench, flags: list[str], message: str) -> None:
    code, found, err = bench(None, *flags)
    assert (code, found) == (1, None)
    assert err.startswith("octavo: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_load_generator_does_without_torch(scripted: Scripted) -> None:
    import subprocess
    import sys

    program = "import sys, octavo.cli.bench_serve, octavo.bench.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
