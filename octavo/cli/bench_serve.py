"""``octavo bench serve``: load for any OpenAI-compatible server, with the flag names of ``vllm bench serve``.

A page goes to standard error, one JSON line to standard output; its names are those of vLLM's results.
"""

import argparse
import json
import math
import os
import sys
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.cli.bench_result import check_file, tell, write_file
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.serve import ArrivalOptions, BenchPrompt, DatasetOptions, ReportOptions, Target
    from octavo.tokenizers import Tokenizer

__all__ = ["add_parser"]

_BACKENDS = ("openai", "openai-chat", "vllm")
_DATASETS = ("random", "sharegpt", "custom")
_METRICS = ("ttft", "tpot", "itl", "e2el")
# Fields of a request that have a flag: name → its type.
_SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}
# What the load generator itself has to say in every request.
_OWN_FIELDS = ("stream", "stream_options", "n", "best_of")


def add_parser(kinds: "argparse._SubParsersAction[Any]") -> None:
    text = "load for any OpenAI-compatible server"
    parser: argparse.ArgumentParser = kinds.add_parser("serve", help=text, description=text, allow_abbrev=False)
    _add_server_flags(parser.add_argument_group("server options"))
    _add_dataset_flags(parser.add_argument_group("dataset options"))
    _add_load_flags(parser.add_argument_group("load options"))
    _add_request_flags(parser.add_argument_group("request options"))
    _add_result_flags(parser.add_argument_group("result options"))
    parser.set_defaults(run=_run)


def _add_server_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--backend", choices=_BACKENDS, default="openai", help="openai-chat: chats; else completions (default: openai)")
    add("--base-url", metavar="URL", help="http[s]://host[:port]; goes before --host and --port")
    add("--host", default="127.0.0.1", help="default: %(default)s")
    add("--port", type=_positive, default=8000, metavar="N", help="default: %(default)s")
    add("--endpoint", metavar="PATH", help="default: /v1/completions, or /v1/chat/completions")
    add("--model", metavar="NAME", help="what the server loaded; its tokenizer is used (default: as the server says)")
    add("--served-model-name", metavar="NAME", help="the model's name in requests (default: --model)")
    add("--tokenizer", metavar="NAME", help="alias, folder, .gguf file or hub name (default: the model's)")
    add("--header", nargs="*", default=[], metavar="KEY=VALUE", help="of every request; OPENAI_API_KEY is sent, too")
    add("--insecure", action="store_true", help="any TLS certificate will do")
    add("--server-pid", type=_positive, metavar="PID", help="tell CPU time and memory of this process and its children")


def _add_dataset_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--dataset-name", choices=_DATASETS, default="random", help="default: %(default)s")
    add("--dataset-path", type=Path, metavar="FILE", help="ShareGPT's JSON; or JSONL with prompt (and output_tokens)")
    add("--num-prompts", type=_positive, default=1000, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="of data and arrivals (default: %(default)s)")
    add("--no-oversample", action="store_true", help="a file with too few prompts is an error")
    add("--disable-shuffle", action="store_true", help="prompts in the file's order")
    add("--random-input-len", type=_positive, default=1024, metavar="N", help="tokens (default: %(default)s)")
    add("--random-output-len", type=_positive, default=128, metavar="N", help="tokens (default: %(default)s)")
    add("--random-prefix-len", type=_whole, default=0, metavar="N", help="tokens before those, shared by all prompts")
    add(
        "--random-range-ratio",
        type=_range_ratio,
        default=(0.0, 0.0),
        metavar="X",
        help='lengths lie evenly within this share of themselves; {"input": X, "output": Y}: each its own (default: 0)',
    )
    add(
        "--random-prompt-form",
        choices=("ids", "text"),
        help="random prompts as token ids, or as text that is exactly so many tokens (default: ids; text for chats)",
    )
    add("--sharegpt-output-len", type=_positive, metavar="N", help="tokens (default: as the file's answers)")
    add("--custom-output-len", type=_custom_len, default=256, metavar="N", help="-1: as the file says (default: 256)")
    add("--input-len", type=_positive, metavar="N", help="the same as --random-input-len")
    add("--output-len", type=_positive, metavar="N", help="of all data sets")


def _add_load_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--request-rate", type=_above_zero, default=math.inf, metavar="X", help="a second (default: inf, all at once)")
    add("--burstiness", type=_above_zero, default=1.0, metavar="X", help="less: more bursty (default: 1, Poisson)")
    add("--max-concurrency", type=_positive, metavar="N", help="requests under way at once (default: all that are due)")
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="the rate grows from start to end")
    add("--ramp-up-start-rps", type=_above_zero, metavar="X", help="requests a second")
    add("--ramp-up-end-rps", type=_above_zero, metavar="X", help="requests a second")
    add("--num-warmups", type=_whole, default=0, metavar="N", help="requests before, not counted (default: 0)")
    add(
        "--ready-check-timeout-sec",
        type=_whole,
        default=0,
        metavar="N",
        help="wait so long for the server (default: 0)",
    )
    add(
        "--request-timeout-sec",
        type=_above_zero,
        default=21600.0,
        metavar="X",
        help="then it has failed (default: 21600)",
    )


def _add_request_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    for name, kind in _SAMPLING.items():
        add("--" + name.replace("_", "-"), type=kind, metavar="X", help="default: what the server does")
    add("--logprobs", type=_whole, metavar="N", help="ask for so many logprobs a token")
    add("--ignore-eos", action="store_true", help="answers are to be exactly as long as asked for")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields of each request")
    add("--request-id-prefix", default=f"bench-{uuid.uuid4().hex[:8]}-", metavar="TEXT", help="of x-request-id")


def _add_result_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    listed = ",".join(_METRICS)
    add("--percentile-metrics", type=_metrics, default=_METRICS, metavar="LIST", help=f"of {listed} (default: all)")
    add("--metric-percentiles", type=_percentiles, default=(99.0,), metavar="LIST", help="as in 50,95,99 (default: 99)")
    add("--goodput", nargs="+", type=_limit, default=[], metavar="METRIC:MS", help="ttft, tpot, e2el: at most so long")
    add("--output-json", type=Path, metavar="FILE", help="write the result to FILE, too")
    add("--save-result", action="store_true", help="write the result to a file with a name of its own")
    add("--save-detailed", action="store_true", help="files hold what became of each request, too")
    add("--result-dir", type=Path, metavar="FOLDER", help="for --save-result (default: the current one)")
    add("--result-filename", metavar="NAME", help="for --save-result (default: of label, rate, model and time)")
    add("--label", metavar="TEXT", help="stands in the result (default: --backend)")
    add("--metadata", nargs="*", type=_pair, default=[], metavar="KEY=VALUE", help="stand in the result")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _run(args: argparse.Namespace) -> int:
    from octavo.bench import serve as bench

    check_file("--output-json", args.output_json)
    if args.result_dir is not None and not args.result_dir.is_dir():
        raise ConfigError(f"--result-dir: there is no folder {args.result_dir}")
    arrivals, report = _arrivals(args), _report(args)
    model, tokenizer_name, target = _target(args)
    prompts = bench.read_prompts(_dataset(args), lambda: _load_tokenizer(tokenizer_name), _say)
    _check_form(args, prompts)
    with _Bar(args.num_prompts, shown=not args.disable_tqdm) as advance:
        load = bench.run_load(
            target,
            prompts,
            arrivals,
            max_concurrency=args.max_concurrency,
            num_warmups=args.num_warmups,
            ready_timeout=args.ready_check_timeout_sec,
            keep_text=args.save_detailed,
            server_pid=args.server_pid,
            on_done=advance,
        )
    measured = bench.summarize(load, prompts, report)
    _say(bench.render(measured, report))
    for warning in bench.warnings_of(measured):
        _say(f"WARNING: {warning}")
    found = _heading(args, model, tokenizer_name) | measured
    whole = found | bench.details(load) if args.save_detailed else found
    tell(found, args.output_json, whole)
    if args.save_result:
        write_file("--save-result", _result_file(args, model), whole)
    return 0 if measured["completed"] else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Bar:
    """A progress bar that is seldom drawn: its time is taken from what is measured."""

    def __init__(self, total: int, *, shown: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, refresh_per_second=2, disable=not shown)
        self._task = self._progress.add_task("bench serve", total=total)

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        return lambda: self._progress.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


# ---- from flags to options ------------------------------------------------------------------------------------------


def _target(args: argparse.Namespace) -> "tuple[str, str, Target]":
    """(the model's name, its tokenizer's, what is asked)."""
    from octavo.bench import serve as bench

    endpoint = args.endpoint or bench.BACKENDS[args.backend]
    base_url = args.base_url or f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{args.port}"
    if endpoint.startswith("/v1/"):
        base_url = base_url.rstrip("/").removesuffix("/v1")
    headers = _headers(args.header)
    model, root = args.model, args.model
    if model is None:
        wait = args.ready_check_timeout_sec
        served = bench.first_model(base_url, headers, insecure=args.insecure, wait=wait)
        model, root = served.id, served.root or served.id
    body = {name: getattr(args, name) for name in (*_SAMPLING, "logprobs") if getattr(args, name) is not None}
    if args.ignore_eos:
        body["ignore_eos"] = True
    target = bench.Target(
        base_url=base_url,
        endpoint=endpoint,
        is_chat=args.backend == "openai-chat",
        headers=headers,
        insecure=args.insecure,
        body={"model": args.served_model_name or model, **body, **args.extra_body},
        request_id_prefix=args.request_id_prefix,
        timeout=args.request_timeout_sec,
    )
    return model, args.tokenizer or root, target


def _headers(stated: list[str]) -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    headers = {} if not key else {"authorization": f"Bearer {key}"}
    return headers | {name.lower(): value for name, value in map(_header, stated)}


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--header {text}: expected KEY=VALUE")
    return name.strip(), value.strip()


def _load_tokenizer(name: str) -> "Tokenizer":
    from octavo.checkpoints import resolve_tokenizer
    from octavo.errors import ModelError
    from octavo.tokenizers import load_tokenizer

    try:
        return load_tokenizer(resolve_tokenizer(name))
    except ModelError as error:
        raise ConfigError(
            f"prompts of a known length need the model's tokenizer; give --tokenizer ({error})"
        ) from error


def _dataset(args: argparse.Namespace) -> "DatasetOptions":
    from octavo.bench import serve as bench

    return bench.DatasetOptions(
        name=args.dataset_name,
        path=args.dataset_path,
        num_prompts=args.num_prompts,
        seed=args.seed,
        as_text=_prompt_form(args) == "text",
        random_input_len=args.input_len or args.random_input_len,
        random_output_len=args.output_len or args.random_output_len,
        random_range_ratio=args.random_range_ratio,
        random_prefix_len=args.random_prefix_len,
        sharegpt_output_len=args.output_len or args.sharegpt_output_len,
        custom_output_len=args.output_len or args.custom_output_len,
        oversample=not args.no_oversample,
        shuffle=not args.disable_shuffle,
    )


def _prompt_form(args: argparse.Namespace) -> str:
    return args.random_prompt_form or ("text" if args.backend == "openai-chat" else "ids")


def _check_form(args: argparse.Namespace, prompts: "list[BenchPrompt]") -> None:
    if args.backend == "openai-chat" and any(isinstance(each.prompt, list) for each in prompts):
        raise ConfigError("chats take text, not token ids; use --backend openai, or prompts that are text")


def _arrivals(args: argparse.Namespace) -> "ArrivalOptions":
    from octavo.bench import serve as bench

    return bench.ArrivalOptions(
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        ramp_up_strategy=args.ramp_up_strategy,
        ramp_up_start_rps=args.ramp_up_start_rps,
        ramp_up_end_rps=args.ramp_up_end_rps,
        seed=args.seed,
    )


def _report(args: argparse.Namespace) -> "ReportOptions":
    from octavo.bench import serve as bench

    return bench.ReportOptions(
        metrics=args.percentile_metrics,
        percentiles=args.metric_percentiles,
        goodput=dict(args.goodput),
        exact_input=args.backend != "openai-chat",
        exact_output=args.ignore_eos,
    )


def _heading(args: argparse.Namespace, model: str, tokenizer: str) -> dict[str, Any]:
    """What was measured, and how."""
    found = {
        "benchmark": "serve",
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label or args.backend,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "dataset_name": args.dataset_name,
        "num_prompts": args.num_prompts,
        "seed": args.seed,
        **dict(args.metadata),
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": "inf" if math.isinf(args.burstiness) else args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if args.dataset_name == "random":
        found["random_prompt_form"] = _prompt_form(args)
    if args.ramp_up_strategy is not None:
        found |= {name: getattr(args, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    return found


def _result_file(args: argparse.Namespace, model: str) -> Path:
    rate = "inf" if math.isinf(args.request_rate) else f"{args.request_rate:g}"
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = args.result_filename or f"{args.label or args.backend}-{rate}qps-{Path(model).name}-{now}.json"
    return Path(args.result_dir or ".", name)


# ---- values of flags ------------------------------------------------------------------------------------------------


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _custom_len(text: str) -> int:
    return -1 if text == "-1" else _positive(text)


def _above_zero(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _range_ratio(text: str) -> tuple[float, float]:
    """(of the prompt, of the answer)."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    both = (value, value) if not isinstance(value, dict) else (value.get("input", 0.0), value.get("output", 0.0))
    if any(isinstance(each, bool) or not isinstance(each, int | float) or not 0 <= each < 1 for each in both):
        raise argparse.ArgumentTypeError(f'must be a number in [0, 1), or {{"input": X, "output": Y}}; got {text!r}')
    return float(both[0]), float(both[1])


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r:.200}")
    own = [name for name in _OWN_FIELDS if name in value]
    if own:
        raise argparse.ArgumentTypeError(f"{', '.join(own)}: a load generator times one stream a request; leave it out")
    return value


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(_METRICS):
        raise argparse.ArgumentTypeError(f"must be some of {','.join(_METRICS)}, got {text!r}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    found = tuple(_number(part) for part in text.split(","))
    if not all(0 <= each <= 100 for each in found):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 to 100 with commas between them, got {text!r}")
    return found


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in ("ttft", "tpot", "e2el") or not _number(value) >= 0:
        raise argparse.ArgumentTypeError(f"must be ttft, tpot or e2el and milliseconds, as in ttft:500; got {text!r}")
    return name, float(value)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
    return name, value
