"""Results of ``benchmarks.compare`` as files, and the table that docs/performance.md shows of them.

A result is what one engine did with one model: RESULTS/MODEL-ENGINE.json, renewed case by case.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

__all__ = ["ENGINES", "Case", "Result", "markers", "read_results", "render", "replace_between_markers"]

ENGINES = {"octavo": "octavo", "vllm": "vLLM", "llama-cpp": "llama.cpp", "openvino": "OpenVINO GenAI"}
BEGIN, END = "<!-- benchmarks.compare writes from here -->", "<!-- to here -->"
_PREFILL_TOKENS = 1024  # cases with fewer prompt tokens than these say little of prefill


@dataclass
class Case:
    """Seconds of each repeat, for the prompts and one token, and for the prompts and all tokens."""

    streams: int
    prompt: int
    output: int
    date: str
    prefill_s: list[float]
    total_s: list[float]

    @property
    def name(self) -> str:
        return f"{self.streams}x{self.prompt}x{self.output}"

    @property
    def decode_rates(self) -> list[float]:
        """Tokens a second of all streams together, of each repeat."""
        tokens = self.streams * (self.output - 1)
        return [tokens / (total - prefill) for total, prefill in zip(self.total_s, self.prefill_s, strict=True)]

    @property
    def prefill_rates(self) -> list[float]:
        return [self.streams * self.prompt / seconds for seconds in self.prefill_s]


@dataclass
class Result:
    """Attributes:

    bandwidth_gb_s: measured before and after the engine ran.
    limits: what ``octavo bench roofline`` says.
    packed_bytes, file_bytes: of the weights in memory and in the checkpoint, where the engine tells them.
    """

    model: str
    engine: str
    version: str
    settings: str
    ready_s: float
    machine: str
    busy_share: float
    bandwidth_gb_s: list[float]
    limits: dict[str, float | int | str]
    cases: dict[str, Case] = field(default_factory=dict)
    packed_bytes: int | None = None
    file_bytes: int | None = None

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _file(folder, self.model, self.engine).write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_results(folder: Path) -> list[Result]:
    found = []
    for path in sorted(folder.glob("*.json")):
        fields = json.loads(path.read_text())
        cases = {name: Case(**each) for name, each in fields.pop("cases").items()}
        found.append(Result(**fields, cases=cases))
    return found


def _file(folder: Path, model: str, engine: str) -> Path:
    return folder / f"{model}-{engine}.json"


def render(results: list[Result]) -> str:
    """Markdown of all models. ValueError if the results are not of one machine."""
    machines = {result.machine for result in results}
    if len(machines) != 1:
        raise ValueError(f"results of {len(machines)} machines ({'; '.join(sorted(machines))}): a table is of one")
    models = sorted({result.model for result in results})
    parts = [_model(model, {each.engine: each for each in results if each.model == model}) for model in models]
    return "\n".join([f"Machine: {machines.pop()}.", "", *parts])


def _model(name: str, results: dict[str, Result]) -> str:
    known = [engine for engine in ENGINES if engine in results]
    peers = [engine for engine in known if engine != "octavo"]
    lines = [f"### {name}", "", *_engines(results), ""]
    head = ["tokens/s, all streams together", *(["octavo"] if "octavo" in results else [])]
    for peer in peers:
        head += [ENGINES[peer], "octavo ÷"] if "octavo" in results else [ENGINES[peer]]
    lines += [_row(head), _row(["---"] * len(head))]
    for title, case, rate in _measures(results):
        figures = {each: _rate(results[each], case, rate) for each in known}
        if all(figure is None for figure in figures.values()):
            continue
        ours = figures.get("octavo")
        row = [title, *([_number(ours)] if "octavo" in results else [])]
        for peer in peers:
            theirs = figures[peer]
            row.append(_number(theirs))
            if "octavo" in results:
                row.append("" if ours is None or theirs is None else f"**{ours / theirs:.2f}**")
        lines.append(_row(row))
    return "\n".join([*lines, "", *_limits(results), ""])


def _engines(results: dict[str, Result]) -> list[str]:
    """Who took part, and how."""
    columns = ["", "version", "weights", "ready after", "measured (UTC)", "repeats", "bandwidth before, after"]
    lines = [_row(columns), _row(["---"] * len(columns))]
    for engine, title in ENGINES.items():
        result = results.get(engine)
        if result is None:
            lines.append(_row([title, "absent: not measured", "", "", "", "", ""]))
            continue
        dates = sorted(case.date for case in result.cases.values())
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        bandwidth = ", ".join(f"{each:.1f}" for each in result.bandwidth_gb_s) + " GB/s"
        if result.busy_share > 0.05:
            bandwidth += f" (others used {result.busy_share:.0%} of the machine)"
        repeats = sorted({len(case.total_s) for case in result.cases.values()})
        counts = "–".join(str(each) for each in dict.fromkeys([repeats[0], repeats[-1]]))
        lines.append(_row([title, result.version, result.settings, f"{result.ready_s:.1f} s", when, counts, bandwidth]))
    return lines


def _measures(results: dict[str, Result]) -> list[tuple[str, str, str]]:
    """(title, case, which rate), decoding first."""
    cases = {case.name: case for result in results.values() for case in result.cases.values()}
    ordered = sorted(cases.values(), key=lambda case: (case.streams, case.prompt, case.output))
    decode = [
        (f"decode, {_streams(case)}, {case.prompt} + {case.output} tokens", case.name, "decode_rates")
        for case in ordered
    ]
    prefill = [
        (f"prefill, {case.streams} × {case.prompt} tokens", case.name, "prefill_rates")
        for case in ordered
        if case.streams * case.prompt >= _PREFILL_TOKENS
    ]
    return decode + prefill


def _streams(case: Case) -> str:
    return "1 stream" if case.streams == 1 else f"{case.streams} streams"


def _rate(result: Result, case: str, rate: str) -> float | None:
    return median(getattr(result.cases[case], rate)) if case in result.cases else None


def _limits(results: dict[str, Result]) -> list[str]:
    """What the machine allows, what octavo makes of it, and how far the repeats were apart."""
    lines = []
    ours = results.get("octavo")
    if ours is not None:
        limits, bandwidth = ours.limits, max(ours.bandwidth_gb_s)
        steps = bandwidth * 1e9 / float(limits["buffer_bytes"])
        text = (
            f"Limits ({limits['kernels']}, {limits['threads']} threads): {bandwidth:.1f} GB/s for "
            f"{float(limits['buffer_bytes']) / 1e6:.0f} MB of {ours.settings} weights are {steps:.1f} steps a second; "
            f"products: {float(limits['bf16_gflop_s']):.0f} GFLOP/s bf16, {float(limits['f32_gflop_s']):.0f} float32, "
            f"{float(limits['int8_gop_s']):.0f} GOP/s int8."
        )
        single = [case for case in ours.cases.values() if case.streams == 1]
        if single:
            shortest = min(single, key=lambda case: case.prompt)
            share = median(shortest.decode_rates) / steps
            text += (
                f" octavo's one stream ({shortest.prompt} + {shortest.output} tokens) reaches **{share:.2f}** of that."
            )
        if ours.packed_bytes and ours.file_bytes:
            share = ours.packed_bytes / ours.file_bytes
            text += f" In memory its weights take **{share:.2f}** of the checkpoint's bytes."
        lines.append(text)
    spread = max(
        (max(rates) - min(rates)) / median(rates)
        for result in results.values()
        for case in result.cases.values()
        for rates in (case.decode_rates,)
    )
    lines.append(
        f"Each figure is the median of its repeats; the decode rates of one case lay at most {spread:.0%} apart."
    )
    return lines


def _number(rate: float | None) -> str:
    if rate is None:
        return "–"
    return f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markers(section: str) -> tuple[str, str]:
    """The lines of a page between which the tables of a section are; "": the first section, which has no name."""
    if not section:
        return BEGIN, END
    return f"<!-- benchmarks.compare, {section}, writes from here -->", f"<!-- {section}: to here -->"


def replace_between_markers(page: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """ValueError if the page does not hold each marker once, in order."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"expected one line {begin!r} and after it one line {end!r}")
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{table.strip()}\n\n{end}{rest.split(end)[1]}"
