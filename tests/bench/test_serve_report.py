"""What the load generator makes of outcomes: figures against numpy's, by hand, and what is told beside them."""

import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.bench.serve import (
    BenchPrompt,
    Failure,
    Load,
    Outcome,
    ProcessUse,
    ReportOptions,
    details,
    read_processes,
    render,
    summarize,
    warnings_of,
)
from octavo.errors import ConfigError


def outcome(start: float, times: list[float], output_tokens: int | None = None, prompt_tokens: int = 3) -> Outcome:
    count = len(times) if output_tokens is None else output_tokens
    return Outcome(start, 0.0, array("d", times), times[-1], prompt_tokens, count)


def failed(kind: str, message: str = "m", times: tuple[float, ...] = ()) -> Outcome:
    return Outcome(times=array("d", times), failure=Failure(kind, message))


def load(*outcomes: Outcome, duration: float = 10.0, cpu: float = 1.0, **more: Any) -> Load:
    return Load(list(outcomes), duration, cpu, more.get("before", []), more.get("after", []))


def figures(done: Load, prompt_len: int | None = 3, output_len: int = 3, **options: Any) -> dict[str, Any]:
    return summarize(done, [BenchPrompt("p", prompt_len, output_len)] * len(done.outcomes), ReportOptions(**options))


def test_throughput_counts_what_was_completed() -> None:
    found = figures(load(outcome(0, [1, 2, 3]), outcome(1, [2, 4]), failed("cut", times=(1.0, 2.0))))
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (6, 5)
    assert found["request_throughput"] == pytest.approx(0.2)
    assert found["output_throughput"] == pytest.approx(0.5)
    assert found["total_token_throughput"] == pytest.approx(1.1)
    assert found["request_goodput"] is None


def test_latencies_are_those_of_numpy() -> None:
    draw = np.random.default_rng(0)
    outcomes = [outcome(0.0, np.cumsum(draw.exponential(0.1, 5)).tolist()) for _ in range(40)]
    found = figures(load(*outcomes), percentiles=(0.0, 50.0, 99.0, 99.9))
    times = np.array([each.times for each in outcomes]) * 1e3
    expected = {
        "ttft": times[:, 0],
        "tpot": (times[:, -1] - times[:, 0]) / 4,
        "itl": np.diff(times, axis=1).ravel(),
        "e2el": times[:, -1],
    }
    for metric, values in expected.items():
        assert found[f"mean_{metric}_ms"] == pytest.approx(values.mean())
        assert found[f"std_{metric}_ms"] == pytest.approx(values.std())
        assert found[f"median_{metric}_ms"] == found[f"p50_{metric}_ms"] == pytest.approx(np.median(values))
        assert found[f"p0_{metric}_ms"] == pytest.approx(values.min())
        assert found[f"p99_{metric}_ms"] == pytest.approx(np.percentile(values, 99))
        assert found[f"p99.9_{metric}_ms"] == pytest.approx(np.percentile(values, 99.9))


def test_time_per_token_is_by_the_servers_count_and_absent_for_a_single_token() -> None:
    found = figures(load(outcome(0, [1, 2], output_tokens=5), outcome(0, [1])))
    assert found["mean_tpot_ms"] == pytest.approx(250)
    assert found["tokens_per_chunk"] == pytest.approx(2)
    assert found["mean_itl_ms"] == pytest.approx(1000)
    assert any("a chunk of a stream held 2.00 tokens" in each for each in warnings_of(found))


def test_only_the_metrics_that_are_wanted_are_told() -> None:
    found = figures(load(outcome(0, [1, 2])), metrics=("ttft",))
    assert "mean_ttft_ms" in found
    assert not any("itl" in name or "e2el" in name for name in found)


def test_nothing_completed_has_no_latency() -> None:
    found = figures(load(failed("connect"), failed("connect")))
    assert found["mean_ttft_ms"] is found["p99_itl_ms"] is None
    assert (found["output_throughput"], found["max_concurrent_requests"]) == (0, 0)
    page = render(found, ReportOptions())
    assert "Requests failed" in page
    assert "latency" not in page


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 1000.0}, 2),
        ({"ttft": 999.0}, 0),
        ({"tpot": 1000.0}, 2),
        ({"ttft": 2000.0, "tpot": 1000.0}, 2),
        ({"e2el": 3000.0, "tpot": 5000.0}, 3),
        ({"e2el": 3500.0, "ttft": 1500.0}, 2),
        ({"e2el": 0.0}, 0),
    ],
)
def test_goodput_counts_requests_within_all_limits(limits: dict[str, float], good: int) -> None:
    """A: first token after 1 s, 1 s a token; B: 2 s, 1 token only; C: 1 s, 2 s a token. A failure is never good."""
    found = figures(load(outcome(0, [1, 2, 3]), outcome(0, [2]), outcome(0, [1, 3]), failed("cut")), goodput=limits)
    assert found["request_goodput"] == pytest.approx(good / 10)


def test_most_at_once_and_most_in_a_second() -> None:
    found = figures(load(outcome(0, [0.1, 0.2, 3]), outcome(1, [1.1, 2]), outcome(2, [2.5]), outcome(5, [6])))
    assert found["max_concurrent_requests"] == 2
    assert found["max_output_tokens_per_s"] == 2


def test_failures_are_counted_by_kind_with_examples() -> None:
    found = figures(load(*[failed("http_503", "busy")] * 3, failed("cut", "gone"), outcome(0, [1])))
    assert found["error_counts"] == {"http_503": 3, "cut": 1}
    assert found["error_samples"] == ["http_503: busy", "cut: gone"]
    (first, *examples) = warnings_of(found)
    assert first == "4 requests failed and are in no figure: 3 http_503, 1 cut"
    assert examples == ["  http_503: busy", "  cut: gone"]


def test_a_load_generator_that_was_the_bottleneck_says_so() -> None:
    honest = figures(load(outcome(0, [1]), cpu=7.9))
    assert (honest["client_cpu_share"], honest["client_was_bottleneck"]) == (pytest.approx(0.79), False)
    assert warnings_of(honest) == []
    busy = figures(load(outcome(0, [1]), cpu=8.1))
    assert busy["client_was_bottleneck"]
    assert "the load generator itself used 81% of a core" in warnings_of(busy)[0]


def test_lengths_that_are_not_as_planned_are_told() -> None:
    done = load(outcome(0, [1, 2, 3]), outcome(0, [1, 2], prompt_tokens=4), failed("cut"))
    found = figures(done, exact_output=True)
    assert (found["input_len_mismatches"], found["output_len_mismatches"]) == (1, 1)
    told = warnings_of(found)
    assert any("1 prompts had another number of tokens" in each for each in told)
    assert any("1 answers were not as long" in each for each in told)
    assert figures(done)["output_len_mismatches"] is None
    assert figures(done, prompt_len=None)["input_len_mismatches"] == 0
    assert figures(done, exact_input=False)["input_len_mismatches"] is None


def test_details_have_an_entry_a_request() -> None:
    whole = outcome(1, [2, 4])
    whole.texts += ["a", "b"]
    found = details(load(whole, failed("cut", "gone")))
    assert found["itls"] == [[2.0], []]
    assert found["ttfts"] == [1.0, None]
    assert found["generated_texts"] == ["ab", ""]
    assert found["errors"] == ["", "cut: gone"]
    assert {len(values) for values in found.values()} == {2}


def test_the_servers_processes_are_told_one_by_one_and_together() -> None:
    before = [ProcessUse(7, "front", 1.0, 100.0), ProcessUse(8, "core", 5.0, 200.0), ProcessUse(9, "old", 1.0, 1.0)]
    after = [ProcessUse(7, "front", 1.5, 110.0), ProcessUse(8, "core", 15.0, 250.0), ProcessUse(10, "new", 0.5, 40.0)]
    found = figures(load(outcome(0, [1, 2, 3], output_tokens=2000), before=before, after=after))
    server = found["server"]
    assert [(each["role"], each["cpu_s"], each["cpu_s_per_1k_tokens"]) for each in server["processes"]] == [
        ("front", 0.5, 0.25),
        ("core", 10.0, 5.0),
        ("new", 0.5, 0.25),
    ]
    assert (server["cpu_s"], server["pss_mb"], server["pss_mb_before"], server["gone"]) == (11.0, 400.0, 301.0, [9])
    page = render(found, ReportOptions())
    assert "front (7): CPU (s)" in page


def test_a_process_tree_is_read_with_its_roles(tmp_path: Path) -> None:
    """A shell that runs a Python program that burns time and holds memory."""
    program = tmp_path / "burn.py"
    program.write_text(
        "import sys, time\nheld = bytearray(60_000_000)\nwhile time.process_time() < 0.3: pass\n"
        "print('burnt', flush=True)\nsys.stdin.read()\n"
    )
    command = [
        sys.executable,
        "-c",
        f"import subprocess; subprocess.run([{sys.executable!r}, {str(program)!r}, 'now'])",
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "burnt\n"
        parent, child = read_processes(process.pid, memory=True)
        process.communicate()
    assert parent.role.endswith(" -c")
    assert child.role == "burn.py now"
    assert child.cpu_s >= 0.29
    assert (child.pss_mb or 0) > 60 > (parent.pss_mb or 0)
    with pytest.raises(ConfigError, match="no such process"):
        read_processes(process.pid, memory=True)


def test_without_memory_only_processor_time_is_read() -> None:
    assert read_processes(os.getpid(), memory=False)[0].pss_mb is None
