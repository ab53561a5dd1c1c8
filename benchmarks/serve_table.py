"""Results of ``benchmarks.serve_compare`` as files, and the table that docs/performance.md shows of them.

A result is what one server did with one model: RESULTS/MODEL-ENGINE.json, renewed case by case. A case is a number of
connections.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

__all__ = ["BEGIN", "END", "SERVERS", "Run", "ServerResult", "read_results", "render", "summary"]

SERVERS = {"octavo": "octavo serve", "vllm": "vllm serve"}
BEGIN, END = "<!-- benchmarks.serve_compare writes from here -->", "<!-- benchmarks.serve_compare writes to here -->"

# (title, field of a run, which values are better)
_MEASURES = [
    ("output tokens/s", "output_throughput"),
    ("median TTFT, ms", "median_ttft_ms"),
    ("median TPOT, ms", "median_tpot_ms"),
    ("p99 ITL, ms", "p99_itl_ms"),
    ("front-end CPU, s a thousand tokens", "front_end_cpu_s"),
    ("memory without the KV cache, MB", "memory_mb"),
]


@dataclass
class Run:
    """One measurement of a case: what ``octavo bench serve`` said. ``memory_mb``: of all processes, without the KV
    cache; None where not all of that was in use yet, so that nobody knows how much of it was in memory."""

    date: str
    completed: int
    output_throughput: float
    median_ttft_ms: float
    median_tpot_ms: float
    p99_itl_ms: float
    front_end_cpu_s: float
    memory_mb: float | None
    client_cpu_share: float


@dataclass
class ServerResult:
    """``cases``: connections → its runs. ``offline``: output tokens/s of the same work without a server, where that
    was measured."""

    model: str
    engine: str
    version: str
    settings: str
    ready_s: float
    machine: str
    busy_share: float
    prompt: int
    output: int
    cases: dict[str, list[Run]] = field(default_factory=dict)
    offline: list[float] = field(default_factory=list)
    offline_connections: int = 0

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.model}-{self.engine}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    def figure(self, case: str, name: str) -> float | None:
        """The median of the runs."""
        values = [getattr(run, name) for run in self.cases.get(case, [])]
        known = [value for value in values if value is not None]
        return median(known) if known else None

    @property
    def offline_share(self) -> float | None:
        """The server's throughput ÷ that of the same work without one."""
        served = self.figure(str(self.offline_connections), "output_throughput")
        return None if served is None or not self.offline else served / median(self.offline)


def read_results(folder: Path) -> list[ServerResult]:
    found = []
    for path in sorted(folder.glob("*.json")):
        fields = json.loads(path.read_text())
        cases = {name: [Run(**run) for run in runs] for name, runs in fields.pop("cases").items()}
        found.append(ServerResult(**fields, cases=cases))
    return found


def summary(results: list[ServerResult]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Model and engine → case → figures: what the one JSON line says."""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for result in results:
        cases = {case: {name: result.figure(case, name) for _, name in _MEASURES} for case in result.cases}
        if result.offline:
            cases["offline"] = {"output_throughput": median(result.offline), "served_share": result.offline_share}
        found[f"{result.model} {result.engine}"] = cases
    return found


def render(results: list[ServerResult]) -> str:
    """Markdown of all models. ValueError if the results are not of one machine."""
    machines = {result.machine for result in results}
    if len(machines) != 1:
        raise ValueError(f"results of {len(machines)} machines ({'; '.join(sorted(machines))}): a table is of one")
    models = sorted({result.model for result in results})
    parts = [_model(model, {each.engine: each for each in results if each.model == model}) for model in models]
    return "\n".join([f"Machine: {machines.pop()}.", "", *parts])


def _model(name: str, results: dict[str, ServerResult]) -> str:
    known = [engine for engine in SERVERS if engine in results]
    one = results[known[0]]
    lines = [f"### {name}: {one.prompt} + {one.output} tokens", "", *_servers(results), ""]
    both = len(known) == 2
    head = ["", *(SERVERS[engine] for engine in known), *(["octavo ÷"] if both else [])]
    lines += [_row(head), _row(["---"] * len(head))]
    cases = sorted({case for result in results.values() for case in result.cases}, key=int)
    for title, field_name in _MEASURES:
        for case in cases:
            figures = [results[engine].figure(case, field_name) for engine in known]
            if all(figure is None for figure in figures):
                continue
            row = [f"{title}, {case} connection{'s' if case != '1' else ''}", *map(_number, figures)]
            if both:
                ours, theirs = figures
                row.append("" if ours is None or not theirs else f"**{ours / theirs:.2f}**")
            lines.append(_row(row))
    return "\n".join([*lines, "", *_remarks(results), ""])


def _servers(results: dict[str, ServerResult]) -> list[str]:
    """Who took part, and how."""
    columns = ["", "version", "settings", "ready after", "measured (UTC)", "runs of a case", "load generator's CPU"]
    lines = [_row(columns), _row(["---"] * len(columns))]
    for engine, title in SERVERS.items():
        result = results.get(engine)
        if result is None:
            lines.append(_row([title, "absent: not measured", "", "", "", "", ""]))
            continue
        runs = [run for each in result.cases.values() for run in each]
        dates = sorted(run.date for run in runs)
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        if result.busy_share > 0.05:
            when += f" (others used {result.busy_share:.0%} of the machine)"
        counts = "–".join(str(each) for each in sorted({len(each) for each in result.cases.values()}))
        share = f"at most {max(run.client_cpu_share for run in runs):.0%} of a core"
        lines.append(_row([title, result.version, result.settings, f"{result.ready_s:.1f} s", when, counts, share]))
    return lines


def _remarks(results: dict[str, ServerResult]) -> list[str]:
    """The server beside the same work without one, and how far the runs were apart."""
    lines = []
    ours = results.get("octavo")
    if ours is not None and ours.offline_share is not None:
        lines.append(
            f"The same work without a server (`LLM`, {ours.offline_connections} sequences at once): "
            f"{median(ours.offline):,.0f} output tokens/s; the server reaches **{ours.offline_share:.2f}** of that."
        )
    rates = [
        [run.output_throughput for run in runs] for result in results.values() for runs in result.cases.values() if runs
    ]
    spread = max((max(each) - min(each)) / median(each) for each in rates)
    lines.append(f"Each figure is the median of its runs; the throughputs of one case lay at most {spread:.0%} apart.")
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.3f}" if value < 1 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
