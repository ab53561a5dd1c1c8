"""What the outcomes come to: throughput, percentiles, goodput and errors, under the names of vLLM's results; and the
same as a page to be read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.bench.serve.datasets import BenchPrompt
from octavo.bench.serve.load import Load
from octavo.bench.serve.outcome import Outcome
from octavo.bench.serve.process_tree import ProcessUse

if TYPE_CHECKING:
    import numpy as np

__all__ = ["GOODPUT_METRICS", "METRICS", "ReportOptions", "details", "render", "summarize", "warnings_of"]

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token, without the first",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_MOST_CPU = 0.8  # of a core; above it the client may be what was measured
_ERROR_SAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Attributes:

    goodput: metric → the most milliseconds of it; empty: not asked for.
    exact_input: the server adds nothing to prompts, as to chats, so that it should count the same tokens.
    exact_output: each answer was to have exactly as many tokens as were asked for.
    """

    metrics: Sequence[str] = tuple(METRICS)
    percentiles: Sequence[float] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)
    exact_input: bool = True
    exact_output: bool = False


def summarize(load: Load, prompts: Sequence[BenchPrompt], options: ReportOptions) -> dict[str, Any]:
    """One entry a figure. Those of latencies are milliseconds; None where nothing was completed."""
    done = [each for each in load.outcomes if each.failure is None]
    seconds = load.duration
    num_input, num_output = sum(each.prompt_tokens for each in done), sum(each.output_tokens for each in done)
    num_chunks = sum(len(each.times) for each in done)
    share = load.client_cpu_s / seconds
    found = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(load.outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / seconds,
        "request_goodput": _num_good(done, options.goodput) / seconds if options.goodput else None,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_output_tokens_per_s": _most_tokens_in_a_second(done),
        "max_concurrent_requests": _most_at_once(done),
        "tokens_per_chunk": num_output / num_chunks if num_chunks else None,
        "error_counts": dict(Counter(each.failure.kind for each in load.outcomes if each.failure is not None)),
        "error_samples": _samples(load.outcomes),
        "input_len_mismatches": _num_other_lengths(load.outcomes, prompts, "input") if options.exact_input else None,
        "output_len_mismatches": _num_other_lengths(load.outcomes, prompts, "output") if options.exact_output else None,
        "client_cpu_s": load.client_cpu_s,
        "client_cpu_share": share,
        "client_was_bottleneck": share > _MOST_CPU,
    }
    for metric in options.metrics:
        found |= _statistics(metric, _values(metric, done), options.percentiles)
    if load.after:
        found["server"] = _server(load, num_output)
    return found


def _values(metric: str, done: Sequence[Outcome]) -> "np.ndarray":
    """Milliseconds, one a request; of ``itl`` one a gap between chunks."""
    import numpy as np

    if metric == "itl":
        return np.concatenate([np.diff(each.times) for each in done] or [np.zeros(0)]) * 1e3
    if metric == "ttft":
        values = [each.ttft for each in done]
    elif metric == "tpot":
        values = [each.tpot for each in done if each.tpot is not None]
    else:
        values = [each.latency for each in done]
    return np.array(values, dtype=float) * 1e3


def _statistics(metric: str, values: "np.ndarray", percentiles: Sequence[float]) -> dict[str, float | None]:
    import numpy as np

    figures: dict[str, float | None] = dict.fromkeys(
        [
            f"mean_{metric}_ms",
            f"median_{metric}_ms",
            f"std_{metric}_ms",
            *(f"p{each:g}_{metric}_ms" for each in percentiles),
        ]
    )
    if len(values):
        parts = np.percentile(values, percentiles)
        found = [values.mean(), np.median(values), values.std(), *parts]
        figures = {name: float(value) for name, value in zip(figures, found, strict=True)}
    return figures


def _num_good(done: Sequence[Outcome], limits: Mapping[str, float]) -> int:
    """Requests that are within all limits. One of a single token has no time between tokens that could be too long."""

    def value(each: Outcome, metric: str) -> float:
        return {"ttft": each.ttft, "tpot": each.tpot or 0.0, "e2el": each.latency}[metric] * 1e3

    return sum(all(value(each, metric) <= most for metric, most in limits.items()) for each in done)


def _most_tokens_in_a_second(done: Sequence[Outcome]) -> float:
    """Chunks stand for tokens here: nobody says when which token of a chunk was made."""
    import numpy as np

    if not done:
        return 0.0
    times = np.concatenate([each.times for each in done])
    return float(np.bincount((times - min(each.start for each in done)).astype(int)).max())


def _most_at_once(done: Sequence[Outcome]) -> int:
    ends = sorted([(each.start, 1) for each in done] + [(each.end, -1) for each in done])
    most = now = 0
    for _, change in ends:
        now += change
        most = max(most, now)
    return most


def _samples(outcomes: Sequence[Outcome]) -> list[str]:
    """The first few errors that differ."""
    texts = (f"{each.failure.kind}: {each.failure.message}" for each in outcomes if each.failure is not None)
    return list(dict.fromkeys(texts))[:_ERROR_SAMPLES]


def _num_other_lengths(outcomes: Sequence[Outcome], prompts: Sequence[BenchPrompt], which: str) -> int:
    """Completed requests whose prompt (or answer) had another number of tokens by the server's count than here."""
    count = 0
    for each, prompt in zip(outcomes, prompts, strict=True):
        ours, theirs = (
            (prompt.num_tokens, each.prompt_tokens) if which == "input" else (prompt.output_len, each.output_tokens)
        )
        count += each.failure is None and ours is not None and ours != theirs
    return count


def _server(load: Load, num_output: int) -> dict[str, Any]:
    """Processor time meanwhile and memory afterwards, of each process and of all."""
    before = {each.pid: each for each in load.before}
    processes: list[dict[str, Any]] = []
    total = 0.0
    for each in load.after:
        earlier = before.get(each.pid)
        used = each.cpu_s - (0.0 if earlier is None else earlier.cpu_s)
        memory = None if earlier is None else earlier.pss_mb
        total += used
        processes.append(
            {
                "pid": each.pid,
                "role": each.role,
                "cpu_s": round(used, 2),
                "cpu_s_per_1k_tokens": _per_thousand(used, num_output),
                "pss_mb_before": memory,
                "pss_mb": each.pss_mb,
            }
        )
    return {
        "cpu_s": round(total, 2),
        "cpu_s_per_1k_tokens": _per_thousand(total, num_output),
        "pss_mb": _sum(load.after),
        "pss_mb_before": _sum(load.before),
        "processes": processes,
        "gone": sorted(before.keys() - {each.pid for each in load.after}),
    }


def _per_thousand(seconds: float, num_tokens: int) -> float | None:
    return seconds / num_tokens * 1e3 if num_tokens else None


def _sum(uses: Sequence[ProcessUse]) -> float:
    return sum(each.pss_mb or 0.0 for each in uses)


def details(load: Load) -> dict[str, list[Any]]:
    """A list a figure, with an entry a request: what --save-detailed keeps."""
    outcomes = load.outcomes
    failed = [each.failure for each in outcomes]
    return {
        "input_lens": [each.prompt_tokens for each in outcomes],
        "output_lens": [each.output_tokens for each in outcomes],
        "start_times": [each.start for each in outcomes],
        "queue_times": [each.queued for each in outcomes],
        "ttfts": [each.ttft if each.times else None for each in outcomes],
        "itls": [[after - before for before, after in zip(each.times, each.times[1:])] for each in outcomes],  # noqa: B905
        "generated_texts": ["".join(each.texts) for each in outcomes],
        "errors": ["" if each is None else f"{each.kind}: {each.message}" for each in failed],
    }


def warnings_of(found: Mapping[str, Any]) -> list[str]:
    """What makes the figures less than they seem."""
    told = []
    if found["client_was_bottleneck"]:
        told.append(
            f"the load generator itself used {found['client_cpu_share']:.0%} of a core: the figures may be its own and "
            "not the server's; use a machine of its own, or less load"
        )
    if found["failed"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in found["error_counts"].items())
        told.append(f"{found['failed']} requests failed and are in no figure: {kinds}")
        told += [f"  {each}" for each in found["error_samples"]]
    if found["input_len_mismatches"]:
        told.append(
            f"{found['input_len_mismatches']} prompts had another number of tokens at the server than here: another "
            "tokenizer (--tokenizer), or tokens that the server adds; the server's count stands"
        )
    if found["output_len_mismatches"]:
        told.append(f"{found['output_len_mismatches']} answers were not as long as was asked for with --ignore-eos")
    if (found["tokens_per_chunk"] or 1.0) > 1.05:
        told.append(
            f"a chunk of a stream held {found['tokens_per_chunk']:.2f} tokens: inter-token latencies are between chunks"
        )
    return told


def render(found: Mapping[str, Any], options: ReportOptions) -> str:
    """The page."""
    rows: list[tuple[str, Any]] = [
        ("Requests completed", found["completed"]),
        ("Requests failed", found["failed"]),
        ("Duration (s)", found["duration"]),
        ("Input tokens", found["total_input_tokens"]),
        ("Output tokens", found["total_output_tokens"]),
        ("Requests/s", found["request_throughput"]),
        ("Output tokens/s", found["output_throughput"]),
        ("Tokens/s, input and output", found["total_token_throughput"]),
        ("Most requests at once", found["max_concurrent_requests"]),
        ("CPU of the load generator (s)", found["client_cpu_s"]),
    ]
    if found["request_goodput"] is not None:
        rows.insert(6, ("Requests/s within --goodput", found["request_goodput"]))
    for metric in options.metrics if found["completed"] else ():
        rows.append((f"{METRICS[metric]} (ms)", ""))
        names = ["mean", "median", *(f"p{each:g}" for each in options.percentiles)]
        rows += [(f"  {name}", found[f"{name}_{metric}_ms"]) for name in names]
    server = found.get("server")
    if server is not None:
        rows += [("Server: CPU (s)", server["cpu_s"]), ("Server: memory, PSS (MB)", server["pss_mb"])]
        for each in server["processes"]:
            rows.append((f"  {each['role']} ({each['pid']}): CPU (s)", each["cpu_s"]))
            rows.append(("    a thousand output tokens", each["cpu_s_per_1k_tokens"]))
            rows.append(("    PSS (MB)", each["pss_mb"]))
    return "\n".join(f"{name:<48}{_shown(value):>14}".rstrip() for name, value in rows)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
