"""octavo beside other engines, on the same work: ``python -m benchmarks.compare --help``.

Each engine runs in a process of its own, one after the other, and the bandwidth of the machine is measured before and
after it. What each did is kept in a folder, so that one of them can be measured again; the table in docs/performance.md
is written from what is there.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.work import read_case
from benchmarks.table import ENGINES, Case, Result, read_results, render, replace_between_markers

_REPOSITORY = Path(__file__).parent.parent
_PROGRAMS = {
    "octavo": "benchmarks.peers.octavo_cpu",
    "vllm": "benchmarks.peers.vllm_cpu",
    "llama-cpp": "benchmarks.peers.llama_cpp",
    "openvino": "benchmarks.peers.openvino_genai",
}
_READS_GGUF = ("llama-cpp", "openvino")
_CASES = "1x32x128,1x1024x64,4x128x64,16x128x64,64x128x64"


class PeerError(Exception):
    """An engine could not be measured; the message says why."""


def main() -> int:
    args = _parser().parse_args()
    failed = False
    for engine in args.engines:
        try:
            _measure(args, engine)
        except PeerError as error:
            print(f"{ENGINES[engine]}: {error}", file=sys.stderr)
            failed = True
    results = read_results(args.results)
    if not results:
        print(f"--results {args.results}: no engine has been measured", file=sys.stderr)
        return 1
    table = render(results)
    print(table)
    if args.page is not None:
        args.page.write_text(replace_between_markers(args.page.read_text(), table))
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder (Hugging Face form), for octavo and vLLM")
    parser.add_argument("--gguf", type=Path, help="file of the same model, for llama.cpp and OpenVINO GenAI")
    parser.add_argument("--name", help="how results and table call the model (default: the folder's name)")
    for engine in _PROGRAMS.keys() - {"octavo"}:
        parser.add_argument(f"--{engine}", metavar="PYTHON", help=f"interpreter that has {ENGINES[engine]}")
    parser.add_argument(
        "--engines",
        type=_engines,
        default=list(ENGINES),
        help=f"which to measure, of {','.join(ENGINES)} ('none': only write the table); default: all that are given",
    )
    parser.add_argument("--cases", default=_CASES, help="STREAMSxPROMPTxOUTPUT,… (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timings of each case (default: 5)")
    parser.add_argument("--results", type=Path, default=_REPOSITORY / "build" / "compare", help="folder of JSON files")
    parser.add_argument("--page", type=Path, help="Markdown file that has the table's two markers")
    return parser


def _engines(text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in ENGINES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(ENGINES)}")
    return names


def _measure(args: argparse.Namespace, engine: str) -> None:
    python = sys.executable if engine == "octavo" else getattr(args, engine.replace("-", "_"))
    if python is None:
        raise PeerError(f"absent (--{engine} was not given)")
    model = args.gguf if engine in _READS_GGUF else args.model
    if model is None:
        raise PeerError("absent (it reads GGUF, and --gguf was not given)")
    for case in args.cases.split(","):
        read_case(case)
    name = args.name or args.model.name
    earlier = {each.engine: each for each in read_results(args.results) if each.model == name}.get(engine)
    busy = busy_share()
    limits = _limits(args.model)
    result = None
    log = args.results / f"{name}-{engine}.log"
    for found in _run(python, engine, model.absolute(), args.cases, args.repeats, log):
        if result is None:
            result = Result(
                model=name,
                engine=engine,
                machine=machine(),
                busy_share=busy,
                bandwidth_gb_s=[limits["bandwidth_gb_s"]],
                limits=limits,
                cases=earlier.cases if earlier is not None else {},
                **found,
            )
            continue
        case = Case(**found, date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"))
        result.cases[case.name] = case
        result.write(args.results)
        print(f"{ENGINES[engine]}, {name}, {case.name}: done", file=sys.stderr)
    if result is None:
        raise PeerError(f"it said nothing; see {log}")
    result.bandwidth_gb_s.append(_limits(args.model)["bandwidth_gb_s"])
    result.write(args.results)


def _run(python: str, engine: str, model: Path, cases: str, repeats: int, log: Path) -> Iterator[dict[str, Any]]:
    """What an engine's process says, line by line."""
    command = [python, "-m", _PROGRAMS[engine], "--model", str(model)]
    command += ["--cases", cases, "--repeats", str(repeats), "--threads", str(len(os.sched_getaffinity(0)))]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--spawned", str(time.monotonic())],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=_REPOSITORY,
        )
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
                else:
                    errors.write(line)
    if process.returncode:
        raise PeerError(f"ended with {process.returncode}; see {log}")


def _limits(model: Path) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("octavo")), "bench", "roofline", "--model", str(model)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise PeerError(f"octavo bench roofline: {process.stderr.strip().splitlines()[-1]}")
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
