"""A server from its start to doing nothing: ``python -m benchmarks.server --model MODEL``. One JSON line.

Times are from the process's start, with the page cache warm. Memory is what all its processes hold (PSS) after one
request, the weights taken off and the KV cache not: beside what ``import torch`` alone holds.
"""

import argparse
import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import psutil

from octavo.bench import measure_roofline

_IDLE_SECONDS = 10.0
_PATIENCE = 120.0  # seconds until a server is given up


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server")
    parser.add_argument("--model", required=True)
    parser.add_argument("--repeats", type=int, default=5, help="starts (default: 5); the first one is not counted")
    args = parser.parse_args()
    runs = [_run(args.model, idle=index == args.repeats) for index in range(args.repeats + 1)]
    weights = measure_roofline(args.model)["buffer_bytes"] / 1e6
    torch_mb = _import_torch_mb()
    found = {name: round(median(run[name] for run in runs[1:]), 3) for name in runs[0]}
    found |= {
        "idle_cpu_share": round(runs[-1]["idle_cpu_share"], 4),
        "weights_mb": round(weights, 1),
        "import_torch_mb": round(torch_mb, 1),
        "beyond_weights_and_torch_mb": round(found["pss_mb"] - weights - torch_mb, 1),
    }
    print(json.dumps(found))


def _run(model: str, idle: bool) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    command = [str(Path(sys.executable).with_name("octavo")), "serve", model, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(process, port, {200, 503})
        listening = time.monotonic() - start
        _await(process, port, {200})
        ready = time.monotonic() - start
        _first_token(port)
        first_token = time.monotonic() - start
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        pss = sum(each.memory_full_info().pss for each in tree) / 1e6
        return {
            "listening_s": listening,
            "ready_s": ready,
            "first_token_s": first_token,
            "pss_mb": pss,
            "idle_cpu_share": _cpu_share(tree) if idle else 0.0,
        }
    finally:
        process.terminate()
        process.wait()


def _await(process: subprocess.Popen[bytes], port: int, statuses: set[int]) -> None:
    """Until /health answers with one of ``statuses``."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status in statuses:
                return
        except OSError:
            pass  # not listening yet
        finally:
            connection.close()
        time.sleep(0.005)
    raise SystemExit("the server did not become ready")


def _first_token(port: int) -> None:
    """Returns when the first piece of a streamed completion is here; then reads the rest."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"prompt": "Once upon a time", "max_tokens": 1, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"the server refused a request: {response.read().decode()}")
    response.read()
    connection.close()


def _cpu_share(tree: list[psutil.Process]) -> float:
    """Of one core, over some seconds in which nobody asks for anything."""

    def used() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in tree)

    time.sleep(2)  # what the request left to do
    before, start = used(), time.monotonic()
    time.sleep(_IDLE_SECONDS)
    return (used() - before) / (time.monotonic() - start)


def _import_torch_mb() -> float:
    program = "import torch, psutil; print(psutil.Process().memory_full_info().pss)"
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout) / 1e6


if __name__ == "__main__":
    main()
