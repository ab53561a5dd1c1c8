"""``octavo bench roofline`` beside another program that measures bandwidth, in turn."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__)
    parser.add_argument("--model", required=True, help="its weights' size is the size of the buffer")
    parser.add_argument("--against", required=True, help="a program that prints figures in GB/s")
    parser.add_argument("--line", default="", help="regular expression: which of its lines to read (default: any)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, in turn (default: 5)")
    args = parser.parse_args()
    pairs = [(_octavo(args.model), _other(args.against, args.line)) for _ in range(args.repeats)]
    ours, theirs = zip(*pairs, strict=True)
    ratio = median(ours) / median(theirs)
    print(json.dumps({"octavo_gb_s": ours, "against_gb_s": theirs, "ratio_of_medians": round(ratio, 3)}))


def _octavo(model: str) -> float:
    command = [str(Path(sys.executable).with_name("octavo")), "bench", "roofline", "--model", model]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return float(json.loads(found)["bandwidth_gb_s"])


def _other(program: str, line: str) -> float:
    """The highest figure of the lines."""
    environment = os.environ | {"OMP_WAIT_POLICY": "active"}
    found = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    figures = [
        float(match[1])
        for each in found.splitlines()
        if re.search(line, each) and (match := re.search(r"([\d.]+) GB/s", each))
    ]
    if not figures:
        raise SystemExit(f"{program} printed no figure in GB/s on a line like {line!r}")
    return max(figures)


if __name__ == "__main__":
    main()
