"""`aiperf`: its load, its counts of tokens, and its scrape of /metrics agree with the server's own counts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from octavo_server import MODEL, OctavoServer

REQUESTS = 12
OUTPUT_TOKENS = 16
INPUT_TOKENS = 48


@pytest.fixture(scope="module")
def open_server() -> Iterator[OctavoServer]:
    """Without keys: aiperf brings none when it reads /metrics."""
    started = OctavoServer(open_to_all=True).wait_ready()
    yield started
    started.check_idle()
    started.close()


def profile(server: OctavoServer, tokenizer: Path, output: Path, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """aiperf's own program; returns its results, and what it read from /metrics meanwhile."""
    aiperf = Path(sys.executable).with_name("aiperf")
    extra = {"ignore_eos": True, "min_tokens": OUTPUT_TOKENS}
    # Told that it is offline, it looks for a folder's tokenizer in the hub's cache.
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [
            *(aiperf, "profile", "--model", MODEL, "--url", server.url, "--tokenizer", tokenizer),
            *("--streaming", "--concurrency", "4", "--request-count", str(REQUESTS), "--random-seed", "1"),
            *("--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--output-tokens-mean", str(OUTPUT_TOKENS)),
            *("--extra-inputs", json.dumps(extra), "--use-server-token-count", "--no-gpu-telemetry"),
            *("--wait-for-model-timeout", "30", "--wait-for-model-mode", "models", "--workers-max", "1"),
            *("--ui", "none", "--output-artifact-dir", output, *words),
        ],
        capture_output=True,
        text=True,
        env=env,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    results, scraped = (
        json.loads((output / name).read_text()) for name in ("profile_export_aiperf.json", "server_metrics_export.json")
    )
    return results, scraped["metrics"]


@pytest.mark.parametrize("endpoint", ["chat --per-chunk-usage", "completions"])
def test_a_run_and_the_servers_counts(
    open_server: OctavoServer, tokenizer_folder: Path, tmp_path: Path, endpoint: str
) -> None:
    before = {name: open_server.metric(name) for name in ("generation_tokens_total", "prompt_tokens_total")}
    results, scraped = profile(open_server, tokenizer_folder, tmp_path, "--endpoint-type", *endpoint.split())
    grown = {name: open_server.metric(name) - value for name, value in before.items()}
    assert results["request_count"]["avg"] == REQUESTS
    assert not results.get("error_request_count")
    assert results["output_sequence_length"]["avg"] == OUTPUT_TOKENS
    assert results["time_to_first_token"]["count"] == REQUESTS
    assert grown["generation_tokens_total"] == REQUESTS * OUTPUT_TOKENS
    assert grown["prompt_tokens_total"] == results["total_isl"]["avg"]
    (series,) = scraped["vllm:generation_tokens"]["series"]
    assert series["stats"]["total"] == REQUESTS * OUTPUT_TOKENS
    assert series["labels"] == {"engine": "0", "model_name": MODEL}
    assert {"vllm:time_to_first_token_seconds", "vllm:num_requests_running"} <= set(scraped)
