"""octavo beside other engines, on the same work: ``python -m benchmarks.compare --help``.

Each engine runs in a process of its own. They take turns, round by round of each case, and those that wait sleep; the
bandwidth of the machine is measured before and after. What each did is kept in a folder, so that one of them can be
measured again; a table in docs/performance.md is written from what is there.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.work import read_case
from benchmarks.table import ENGINES, Case, Result, markers, read_results, render, replace_between_markers

_REPOSITORY = Path(__file__).parent.parent
_PROGRAMS = {
    "octavo": "benchmarks.peers.octavo_cpu",
    "vllm": "benchmarks.peers.vllm_cpu",
    "llama-cpp": "benchmarks.peers.llama_cpp",
    "openvino": "benchmarks.peers.openvino_genai",
}
_READS_GGUF = ("llama-cpp", "openvino")
_CASES = "1x32x128,1x1024x64,4x128x64,16x128x64,64x128x64"
_PAUSE = 0.5  # seconds: threads of OpenMP wait awake for a fifth of one before they sleep


class PeerError(Exception):
    """An engine could not be measured; the message says why."""


class Peer:
    """An engine in a process of its own, which computes a round of a case when it is told to.

    Attributes:
        facts: what it said of itself when it was ready.

    Raises:
        PeerError: it ended, or said nothing.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, "--spawned", str(time.monotonic())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=_REPOSITORY,
            )
        self.facts = self._answer()

    def round(self, case: str) -> dict[str, float]:
        """Seconds that it took."""
        time.sleep(_PAUSE)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(case + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what became of it is told below
        return self._answer()

    def end(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
            with self._log.open("a") as errors:
                errors.write(line)
        raise PeerError(f"ended with {self._process.wait()}; see {self._log}")


def main() -> int:
    args = _parser().parse_args()
    args.results = args.results or _REPOSITORY / "build" / "-".join(filter(None, ["compare", args.section]))
    failed = not _measure(args) if args.engines else False
    results = read_results(args.results)
    if not results:
        print(f"--results {args.results}: no engine has been measured", file=sys.stderr)
        return 1
    table = render(results)
    print(table)
    if args.page is not None:
        args.page.write_text(replace_between_markers(args.page.read_text(), table, *markers(args.section)))
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, help="folder (Hugging Face form), for octavo and vLLM; without it octavo reads the file"
    )
    parser.add_argument("--gguf", type=Path, help="file of the same model, for llama.cpp and OpenVINO GenAI")
    parser.add_argument("--name", help="how results and table call the model (default: the folder's or file's name)")
    for engine in _PROGRAMS.keys() - {"octavo"}:
        parser.add_argument(f"--{engine}", metavar="PYTHON", help=f"interpreter that has {ENGINES[engine]}")
    parser.add_argument(
        "--engines",
        type=_engines,
        default=list(ENGINES),
        help=f"which to measure, of {','.join(ENGINES)} ('none': only write the table); default: all that are given",
    )
    parser.add_argument(
        "--with", dest="flags", metavar="FLAGS", default="", help="octavo's, as in '--quantization int8'"
    )
    parser.add_argument("--cases", type=_cases, default=_CASES, help="STREAMSxPROMPTxOUTPUT,… (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timings of each case (default: 5)")
    parser.add_argument("--section", default="", help="of the page: the name in its markers (default: the unnamed one)")
    parser.add_argument("--results", type=Path, help="folder of JSON files (default: build/compare, or the section's)")
    parser.add_argument("--page", type=Path, help="Markdown file that has the section's two markers")
    return parser


def _engines(text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in ENGINES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(ENGINES)}")
    return names


def _cases(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        read_case(name)
    return names


def _measure(args: argparse.Namespace) -> bool:
    """Whether all engines were measured that were asked for. What was measured is kept, case by case."""
    model = args.model or args.gguf
    if model is None:
        raise SystemExit("benchmarks.compare: --model or --gguf is needed")
    name = args.name or (model.stem if model.is_file() else model.name)
    busy, limits = busy_share(), _limits(model)
    peers: dict[str, Peer] = {}
    for engine in args.engines:
        try:
            peers[engine] = Peer(_command(args, engine), args.results / f"{name}-{engine}.log")
        except PeerError as error:
            print(f"{ENGINES[engine]}: {error}", file=sys.stderr)
    earlier = {each.engine: each for each in read_results(args.results) if each.model == name}
    results = {
        engine: Result(
            model=name,
            engine=engine,
            machine=machine(),
            busy_share=busy,
            bandwidth_gb_s=[limits["bandwidth_gb_s"]],
            limits=limits,
            cases=earlier[engine].cases if engine in earlier else {},
            **peer.facts,
        )
        for engine, peer in peers.items()
    }
    for case in args.cases:
        for engine, rounds in _in_turn(peers, case, args.repeats).items():
            streams, prompt, output = read_case(case)
            prefill, total = ([each[key] for each in rounds] for key in ("prefill_s", "total_s"))
            date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
            results[engine].cases[case] = Case(streams, prompt, output, date, prefill, total)
            results[engine].write(args.results)
        print(f"{name}, {case}: done", file=sys.stderr)
    for peer in peers.values():
        peer.end()
    bandwidth = _limits(model)["bandwidth_gb_s"]
    for engine in peers:
        results[engine].bandwidth_gb_s.append(bandwidth)
        results[engine].write(args.results)
    return len(peers) == len(args.engines)


def _in_turn(peers: dict[str, Peer], case: str, repeats: int) -> dict[str, list[dict[str, float]]]:
    """The rounds of each engine, without the first, which warms up. One that fails leaves ``peers``."""
    rounds: dict[str, list[dict[str, float]]] = {engine: [] for engine in peers}
    for _ in range(repeats + 1):
        for engine in list(peers):
            try:
                rounds[engine].append(peers[engine].round(case))
            except PeerError as error:
                print(f"{ENGINES[engine]}: {error}", file=sys.stderr)
                del peers[engine]
    return {engine: rounds[engine][1:] for engine in peers}


def _command(args: argparse.Namespace, engine: str) -> list[str]:
    """Raises PeerError where the engine, or the model in its form, was not given."""
    python = sys.executable if engine == "octavo" else getattr(args, engine.replace("-", "_"))
    if python is None:
        raise PeerError(f"absent (--{engine} was not given)")
    model = args.gguf if engine in _READS_GGUF else args.model
    if model is None and engine == "octavo":
        model = args.gguf
    if model is None:
        reads = "--gguf" if engine in _READS_GGUF else "--model"
        raise PeerError(f"absent (it reads what {reads} names, and that was not given)")
    command = [python, "-m", _PROGRAMS[engine], "--model", str(model.absolute())]
    command += ["--threads", str(len(os.sched_getaffinity(0)))]
    return [*command, f"--flags={args.flags}"] if engine == "octavo" else command


def _limits(model: Path) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("octavo")), "bench", "roofline", "--model", str(model)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"octavo bench roofline: {process.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(process.stdout)
    return found


def busy_share() -> float:
    """The share of the machine that others use just now, over a second."""

    def jiffies() -> list[int]:
        return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]

    before = jiffies()
    time.sleep(1)
    passed = [after - earlier for after, earlier in zip(jiffies(), before, strict=True)]
    return 1 - (passed[3] + passed[4]) / max(sum(passed), 1)


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict((part.strip() for part in line.split(":", 1)) for line in lines if ":" in line)
    units = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in fields.get("flags", "").split()]
    return (
        f"{fields.get('model name', platform.machine())} (family {fields.get('cpu family', '?')}, model "
        f"{fields.get('model', '?')}), {len(os.sched_getaffinity(0))} cores, {units[0] if units else 'no vector unit'}"
    )


if __name__ == "__main__":
    sys.exit(main())
