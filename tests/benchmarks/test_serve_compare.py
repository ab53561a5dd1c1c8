"""``benchmarks.serve_compare``: what becomes of results, and a run from end to end with a stand-in for the servers."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import serve_compare
from benchmarks.serve_table import BEGIN, END, Run, ServerResult, read_results, render


def run(throughput: float, memory_mb: float | None = 500.0, **changes: float) -> Run:
    fields = {
        "completed": 64,
        "output_throughput": throughput,
        "median_ttft_ms": 50.0,
        "median_tpot_ms": 20.0,
        "p99_itl_ms": 90.0,
        "front_end_cpu_s": 0.05,
        "client_cpu_share": 0.02,
    }
    return Run(date="2026-01-02 03:04", memory_mb=memory_mb, **fields | changes)  # type: ignore[arg-type]


def result(engine: str, cases: dict[str, list[Run]], **changes: object) -> ServerResult:
    fields: dict[str, object] = {
        "model": "a-model",
        "engine": engine,
        "version": "1.2",
        "settings": "bf16",
        "ready_s": 2.0,
        "machine": "a machine",
        "busy_share": 0.01,
        "prompt": 128,
        "output": 64,
        "cases": cases,
    }
    return ServerResult(**fields | changes)  # type: ignore[arg-type]


def test_a_figure_is_the_median_of_its_runs_and_the_ratio_is_of_medians() -> None:
    ours = result("octavo", {"64": [run(600), run(700), run(100)]})
    theirs = result("vllm", {"64": [run(300, median_ttft_ms=200)], "1": [run(30)]})
    table = render([ours, theirs])
    assert "| output tokens/s, 64 connections | 600 | 300 | **2.00** |" in table
    assert "| median TTFT, ms, 64 connections | 50.0 | 200 | **0.25** |" in table
    assert "| output tokens/s, 1 connection | – | 30.0 |  |" in table
    assert table.index(", 1 connection ") < table.index("output tokens/s, 64 connections")


def test_memory_that_is_not_known_is_left_out_of_the_median() -> None:
    table = render([result("octavo", {"1": [run(1, memory_mb=None)], "64": [run(1, memory_mb=None), run(1)]})])
    assert "| memory without the KV cache, MB, 64 connections | 500 |" in table
    assert "MB, 1 connection" not in table
    assert "| vllm serve | absent: not measured |" in table


def test_the_server_is_compared_with_the_same_work_without_one() -> None:
    ours = result("octavo", {"64": [run(600)]}, offline=[700.0, 800.0, 900.0], offline_connections=64)
    assert ours.offline_share == pytest.approx(0.75)
    assert "reaches **0.75** of that" in render([ours])
    assert result("octavo", {"1": [run(1)]}, offline=[1.0], offline_connections=64).offline_share is None


def test_results_of_two_machines_are_no_table() -> None:
    with pytest.raises(ValueError, match="results of 2 machines"):
        render([result("octavo", {}), result("vllm", {}, machine="another")])


def test_results_are_kept_as_files(tmp_path: Path) -> None:
    kept = [result("octavo", {"1": [run(1, None)]}, offline=[2.0]), result("vllm", {"64": [run(1), run(2)]})]
    for each in kept:
        each.write(tmp_path / "results")
    assert read_results(tmp_path / "results") == kept


@pytest.mark.parametrize("text", ["0", "65", "1,x", ""])
def test_a_number_of_connections_that_cannot_be_measured_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="numbers of connections"):
        serve_compare._cases(text)


STAND_IN = '''#!{python}
"""octavo's command: a server that answers /health, and results by the number of connections."""
import http.server, json, sys
words = sys.argv[1:]
if words[0] == "serve":
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *_):
            pass
    http.server.HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Health).serve_forever()
connections = int(words[words.index("--max-num-seqs" if words[1] == "throughput" else "--max-concurrency") + 1])
if words[1] == "throughput":
    print(json.dumps({{"output_tokens_s": 1000.0}}))
    sys.exit()
if connections == 7:
    sys.exit("octavo: error: seven")
used = {{"octavo serve": 0.25, "octavo.engine.core_proc": 9.0}}
processes = [{{"role": role, "cpu_s_per_1k_tokens": seconds}} for role, seconds in used.items()]
figures = dict.fromkeys(["median_ttft_ms", "median_tpot_ms", "p99_itl_ms"], 5.0)
print(json.dumps({{
    "failed": 1 if connections == 6 else 0, "output_len_mismatches": 0, "client_was_bottleneck": False, "completed": 16,
    "total_input_tokens": 30000 * connections, "total_output_tokens": 1, "output_throughput": 100.0 * connections,
    "client_cpu_share": 0.01, "server": {{"processes": processes, "pss_mb": 1000.0}}, **figures,
}}))
'''


def test_a_server_is_measured_case_by_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The front end's processor time is that of all processes but the engine's; memory is known when the KV cache has
    been in use. What fails leaves what was measured as it was."""
    command = tmp_path / "octavo"
    command.write_text(STAND_IN.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setattr(serve_compare, "_OCTAVO", str(command))
    monkeypatch.setattr(serve_compare, "busy_share", lambda: 0.0)
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")

    def measure(cases: str) -> int:
        words = f"x --model {tmp_path} --name m --engines octavo --cases {cases} --repeats 2"
        monkeypatch.setattr(sys, "argv", [*words.split(), "--results", str(tmp_path / "r"), "--page", str(page)])
        return serve_compare.main()

    assert measure("1") == measure("4") == 0
    (found,) = read_results(tmp_path / "r")
    assert [[each.output_throughput for each in found.cases[case]] for case in ("1", "4")] == [[100.0] * 2, [400.0] * 2]
    assert [each.memory_mb for each in found.cases["1"]] == [None, pytest.approx(1000 - (384 << 20) / 1e6)]
    assert found.cases["4"][0].front_end_cpu_s == 0.25
    assert found.offline_share == pytest.approx(0.4)
    assert "output tokens/s, 4 connections" in page.read_text()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["m octavo"]["4"]["output_throughput"] == 400
    assert measure("7") == measure("6") == 1
    err = capsys.readouterr().err
    assert "octavo serve: " in err
    assert "octavo: error: seven" in err
    assert "a run with 6 connections is worth nothing" in err
    assert read_results(tmp_path / "r") == [found]


def test_a_server_that_does_not_start_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tmp_path / "octavo"
    command.write_text("#!/bin/sh\nexit 3\n")
    command.chmod(0o755)
    monkeypatch.setattr(serve_compare, "_OCTAVO", str(command))
    words = f"x --model {tmp_path} --engines octavo,vllm --cases 1 --repeats 1 --results {tmp_path / 'r'}"
    monkeypatch.setattr(sys, "argv", words.split())
    assert serve_compare.main() == 1
    err = capsys.readouterr().err
    assert "octavo serve: ended with 3 before it was ready; see " in err
    assert "vllm serve: absent (--vllm was not given)" in err
