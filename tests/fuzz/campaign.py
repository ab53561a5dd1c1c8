"""Many damaged checkpoints, by several child processes that are started again when they die.

``python -m tests.fuzz.campaign --mutations 100000 --workers 2`` prints counts and failures; a failure's seed alone is
tried again with ``--first SEED --mutations 1``.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.subjects import write_subjects

__all__ = ["Report", "run_campaign"]

_ROOT = Path(__file__).resolve().parents[2]
# Much longer than a child lets an attempt take: it hangs.
_HANG_SECONDS = 60.0


@dataclass
class Report:
    """What came of the attempts: (file, mutation, outcome) → how many, and those that went wrong."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, attempt: dict[str, Any]) -> None:
        self.counts[attempt["file"], attempt["mutation"], attempt["outcome"]] += 1
        if attempt["outcome"] == "failed":
            self.failures.append(attempt)

    def total(self, outcome: str | None = None) -> int:
        return sum(count for (_, _, found), count in self.counts.items() if outcome in (None, found))

    def table(self, column: int) -> str:
        """A line for each file (0) or mutation (1)."""
        lines = []
        for name in sorted({key[column] for key in self.counts}):
            found = Counter[str]()
            for key, count in self.counts.items():
                if key[column] == name:
                    found[key[2]] += count
            numbers = ", ".join(f"{found[outcome]} {outcome}" for outcome in ("refused", "loaded", "failed"))
            lines.append(f"  {name:36} {numbers}")
        return "\n".join(lines)


def run_campaign(
    folder: Path, seeds: range, workers: int = 1, progress: bool = False, module: str = "tests.fuzz.attempts"
) -> Report:
    """Tries each seed once, in children that run ``module``. ``folder`` is empty; the whole checkpoints stay in it."""
    subjects = write_subjects(folder)
    (folder / "subjects.json").write_text(json.dumps([dataclasses.asdict(subject) for subject in subjects]))
    report, lock = Report(), threading.Lock()

    def add(attempt: dict[str, Any]) -> None:
        with lock:
            report.add(attempt)
            if progress and report.total() % 1000 == 0:
                print(f"{report.total()} tried, {len(report.failures)} failed", flush=True)

    threads = [
        threading.Thread(target=_work, args=(module, folder, range(seeds.start + index, seeds.stop, workers), add))
        for index in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return report


def _work(module: str, folder: Path, seeds: range, add: Any) -> None:
    """Has children try the seeds, one after another."""
    while seeds:
        left = _one_child(module, folder, seeds, add)
        assert len(left) < len(seeds), "a child began nothing"
        seeds = left


def _one_child(module: str, folder: Path, seeds: range, add: Any) -> range:
    """What is left to do when the child has ended."""
    command = [sys.executable, "-m", module, str(folder), str(seeds.start), str(seeds.stop)]
    with tempfile.TemporaryFile(dir=folder) as errors:
        child = subprocess.Popen(
            [*command, str(seeds.step)], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=_ROOT
        )
        assert child.stdout is not None
        begun: dict[str, Any] | None = None
        while True:
            watchdog = threading.Timer(_HANG_SECONDS, child.kill)
            watchdog.start()
            line = child.stdout.readline()
            watchdog.cancel()
            if not line:
                break
            attempt = json.loads(line)
            seeds = range(attempt["seed"] + seeds.step, seeds.stop, seeds.step)
            if "outcome" in attempt:
                add(attempt)
                begun = None
            else:
                begun = attempt
        code = child.wait()
        if begun is not None or code != 0:
            errors.seek(0)
            last = errors.read().decode(errors="replace")[-2000:]
            if begun is None:
                raise RuntimeError(f"a child ended with {code} between two attempts: {last}")
            add(begun | {"outcome": "failed", "detail": f"the process ended with {code} (-9: it hung): {last}"})
    return seeds


def main() -> int:
    parser = argparse.ArgumentParser(description="Loads damaged checkpoints.")
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(options.first, options.first + options.mutations)
        report = run_campaign(Path(folder), seeds, options.workers, progress=options.mutations > 1000)
    print(f"{report.total()} mutations: {report.total('refused')} refused in one line, {report.total('loaded')} loaded")
    print(f"by file:\n{report.table(0)}\nby mutation:\n{report.table(1)}")
    for failure in report.failures[:20]:
        print(f"\nFAILED {failure}".replace("\\n", "\n"))
    print(f"{len(report.failures)} failed")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
