"""``octavo bench latency | throughput | startup | roofline | serve``, with the flag names of ``vllm bench``.

One JSON line comes at the end, on standard output; everything else goes to standard error.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.cli import bench_serve
from octavo.cli.bench_result import check_file, tell
from octavo.config import EngineArgs

__all__ = ["add_parser"]


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    parser = subparsers.add_parser("bench", help="measure speed on this machine", allow_abbrev=False)
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    latency = _kind(kinds, "latency", "one batch after another, from its prompts to its last token", _latency)
    _sizes(latency, input_len=32, output_len=128)
    _count(latency, "--batch-size", 8, "requests in a batch")
    _count(latency, "--num-iters-warmup", 1, "runs that do not count")
    _count(latency, "--num-iters", 5, "runs that count")
    throughput = _kind(kinds, "throughput", "many requests at once", _throughput)
    _sizes(throughput, input_len=128, output_len=64)
    _count(throughput, "--num-prompts", 64, "requests")
    startup = _kind(kinds, "startup", "from a new process to the first token", _startup)
    _count(startup, "--num-iters", 5, "runs that count")
    roofline = _kind(kinds, "roofline", "how fast this machine reads memory and multiplies", _roofline, engine=False)
    types = ("bfloat16", "float32")
    roofline.add_argument("--dtype", choices=types, default=types[0], help=f"of the weights (default: {types[0]})")
    bench_serve.add_parser(kinds)


def _kind(
    kinds: "argparse._SubParsersAction[Any]",
    name: str,
    text: str,
    work: Callable[..., dict[str, Any]],
    *,
    engine: bool = True,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.add_argument("--model", help="as for serve (default: the demo model)")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the result to FILE, too")
    if engine:
        EngineArgs.add_cli_args(parser)
    parser.set_defaults(run=lambda args: _run(args, name, work))
    return parser


def _sizes(parser: argparse.ArgumentParser, input_len: int, output_len: int) -> None:
    _count(parser, "--input-len", input_len, "tokens of a prompt")
    _count(parser, "--output-len", output_len, "tokens to generate")


def _count(parser: argparse.ArgumentParser, flag: str, default: int, text: str) -> None:
    parser.add_argument(flag, type=_positive, default=default, metavar="N", help=f"{text} (default: {default})")


def _run(args: argparse.Namespace, name: str, work: Callable[..., dict[str, Any]]) -> int:
    check_file("--output-json", args.output_json)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"bench {name}", total=None)

        def advance(total: int) -> Callable[[], None]:
            progress.update(task, total=total)
            return lambda: progress.advance(task)

        found = work(args, advance)
    tell({"benchmark": name, **found}, args.output_json)
    return 0


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {"model": _model(args), **EngineArgs.stated_options(args)}


def _model(args: argparse.Namespace) -> str:
    from octavo.checkpoints import DEFAULT_MODEL

    return args.model or DEFAULT_MODEL


def _latency(args: argparse.Namespace, advance: Callable[[int], Callable[[], None]]) -> dict[str, Any]:
    from octavo.bench import measure_latency

    return measure_latency(
        _engine_options(args),
        input_len=args.input_len,
        output_len=args.output_len,
        batch_size=args.batch_size,
        num_iters_warmup=args.num_iters_warmup,
        num_iters=args.num_iters,
        on_iteration=advance(args.num_iters_warmup + args.num_iters),
    )


def _throughput(args: argparse.Namespace, advance: Callable[[int], Callable[[], None]]) -> dict[str, Any]:
    from octavo.bench import measure_throughput

    return measure_throughput(
        _engine_options(args),
        input_len=args.input_len,
        output_len=args.output_len,
        num_prompts=args.num_prompts,
        on_iteration=advance(1),
    )


def _startup(args: argparse.Namespace, advance: Callable[[int], Callable[[], None]]) -> dict[str, Any]:
    from octavo.bench import measure_startup

    return measure_startup(_engine_options(args), num_iters=args.num_iters, on_iteration=advance(args.num_iters + 1))


def _roofline(args: argparse.Namespace, advance: Callable[[int], Callable[[], None]]) -> dict[str, Any]:
    from octavo.bench import measure_roofline

    done = advance(1)
    found = measure_roofline(_model(args), args.dtype)
    done()
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)
