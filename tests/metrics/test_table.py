"""MetricTable: what several front ends count is one sum, whoever is asked; they must agree on what they count."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from octavo.errors import ConfigError
from octavo.metrics import EngineMetrics, HttpMetrics, MetricsFolder
from octavo.metrics.table import MetricTable

COUNTING = """
import sys
from pathlib import Path
from octavo.metrics import EngineMetrics, HttpMetrics, MetricsFolder
from octavo.types import *

index = int(sys.argv[2])
folder = MetricsFolder(Path(sys.argv[1]), index, 3)
engine = EngineMetrics("m", max_model_len=512, folder=folder)
http = HttpMetrics(["/a"], folder)
engine.on_ready({"block_size": 16}, lambda: (0.5, False))
for turn in range(1000):
    engine.on_outputs(StepCounts(5, 2, 3, [0.03 * index], {0.02: 2, 0.5: 1}))
    http.on_answered("/a", "GET", 200, 0.2, 10, 20)
    if index == 0:  # only the first hears of the scheduler
        stats = SchedulerStats(num_running=2, kv_cache_usage=0.25, preemptions_total=turn + 1, step_tokens=4)
        engine.on_step(stats)
print("counted", flush=True)
sys.stdin.read()
"""


def samples(text: str) -> dict[str, float]:
    """All but what tells of processes."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith(("#", "process_")))
    return {name: float(value) for name, _, value in lines}


def test_every_front_end_tells_the_sum_over_all_of_them(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COUNTING, str(tmp_path), str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for index in (0, 1)
    ]
    # The third is this process.
    folder = MetricsFolder(tmp_path, 2, 3)
    engine, http = EngineMetrics("m", max_model_len=512, folder=folder), HttpMetrics(["/a"], folder)
    engine.on_ready({"block_size": 16}, lambda: (0.5, False))
    http.on_answered("/a", "GET", 404, 0.2, 0, 0)
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"counted\n"
        for file in tmp_path.iterdir():  # a server removes them when all front ends are there
            file.unlink()
        rendered = engine.render().decode()
        found = samples(rendered + http.render().decode())
    finally:
        for process in processes:
            process.communicate()
    both = 'engine="0",model_name="m"'
    assert found[f"vllm:prompt_tokens_total{{{both}}}"] == 10_000
    assert found[f"vllm:generation_tokens_total{{{both}}}"] == 6000
    assert found['vllm:inter_token_latency_seconds_bucket{engine="0",le="0.025",model_name="m"}'] == 4000
    assert found[f"vllm:inter_token_latency_seconds_count{{{both}}}"] == 6000
    assert found[f"vllm:inter_token_latency_seconds_sum{{{both}}}"] == pytest.approx(2000 * 0.54)
    assert found[f"vllm:time_to_first_token_seconds_sum{{{both}}}"] == pytest.approx(30.0)
    assert (found[f"vllm:num_requests_running{{{both}}}"], found[f"vllm:kv_cache_usage_perc{{{both}}}"]) == (2, 0.25)
    assert found[f"vllm:num_preemptions_total{{{both}}}"] == 1000
    assert found['vllm:cache_config_info{block_size="16",engine="0"}'] == 1
    assert found['http_requests_total{handler="/a",method="GET",status="2xx"}'] == 2000
    assert found['http_requests_total{handler="/a",method="GET",status="4xx"}'] == 1
    assert found['http_request_size_bytes_sum{handler="/a"}'] == 20_000

    alone, http_alone = EngineMetrics("m", max_model_len=512), HttpMetrics(["/a"])
    alone.on_ready({"block_size": 16}, lambda: (0.5, False))
    http_alone.on_answered("/a", "GET", 200, 0.2, 10, 20)
    http_alone.on_answered("/a", "GET", 404, 0.2, 10, 20)
    assert samples(alone.render().decode() + http_alone.render().decode()).keys() == found.keys()


def test_processes_are_added_up_and_the_first_one_is_the_start(tmp_path: Path) -> None:
    metrics = EngineMetrics("m", max_model_len=512, folder=MetricsFolder(tmp_path, 0, 3))
    before = process_samples(metrics)
    child = subprocess.Popen(
        [sys.executable, "-c", COUNTING, str(tmp_path), "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"counted\n"
        after = process_samples(metrics)
    finally:
        child.communicate()
    assert after["process_resident_memory_bytes"] > before["process_resident_memory_bytes"] + 2**20
    assert after["process_start_time_seconds"] == before["process_start_time_seconds"]
    assert after.keys() == before.keys()


def test_front_ends_that_count_different_things_are_not_added_up(tmp_path: Path) -> None:
    first = EngineMetrics("m", max_model_len=512, folder=MetricsFolder(tmp_path, 0, 2))
    EngineMetrics("m", max_model_len=2048, folder=MetricsFolder(tmp_path, 1, 2))
    with pytest.raises(RuntimeError, match="different configurations"):
        first.render()


def process_samples(metrics: EngineMetrics) -> dict[str, float]:
    lines = (line.split(" ") for line in metrics.render().decode().splitlines() if line.startswith("process_"))
    return {name: float(value) for name, value in lines}


def test_a_front_end_that_is_still_starting_does_not_count_yet(tmp_path: Path) -> None:
    first = MetricTable(MetricsFolder(tmp_path, 0, 2))
    second = MetricTable(MetricsFolder(tmp_path, 1, 2))
    counters = [table.counter("c", "", {}) for table in (first, second)]
    for counter in counters:
        counter.inc(2)
    first.seal()
    assert [sample.value for family in first.collect() for sample in family.samples] == [2]
    second.seal()
    assert [sample.value for family in first.collect() for sample in family.samples] == [4]


def test_a_series_that_is_only_shown_once_seen(tmp_path: Path) -> None:
    table = MetricTable()
    counters = [table.counter("c", "text", {"kind": kind}, only_seen=True) for kind in "ab"]
    table.seal()
    registry = CollectorRegistry()
    registry.register(table)
    counters[1].inc()
    assert generate_latest(registry).decode().splitlines()[2:] == ['c_total{kind="b"} 1.0']


def test_declarations_that_contradict_each_other_are_refused() -> None:
    table = MetricTable()
    table.counter("c", "text", {"kind": "a"})
    with pytest.raises(ValueError, match="c is declared in two ways"):
        table.counter("c", "text", {"reason": "a"})
    with pytest.raises(ValueError, match="c is declared in two ways"):
        table.gauge("c", "text", {"kind": "b"})
    with pytest.raises(ValueError, match="no more than"):
        table.histogram("large", "text", {}, range(10_000))


def test_files_are_private(tmp_path: Path) -> None:
    MetricTable(MetricsFolder(tmp_path, 0, 2), "numbers")
    assert (tmp_path / "numbers").stat().st_mode & 0o777 == 0o600


def test_a_disk_that_is_full_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"has no room for \d+ bytes .* No space left on device; set TMPDIR"):
        MetricTable(MetricsFolder(tmp_path, 0, 2))
