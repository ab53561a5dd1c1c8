"""How far octavo's numbers are from float32, beside others': ``python -m benchmarks.quality --help``.

Mean KL divergence of the next-token distributions over a fixed text (benchmarks/text.txt: the beginning of Lewis
Carroll's "Alice's Adventures in Wonderland", 1865) from those of transformers in float32: of GGUF files, octavo beside
llama.cpp; of what octavo makes of the model by its own flags; and without either, of bfloat16, beside torch's. All get
the same token ids. What was found is kept, so that one of them can be measured again.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import transformers

from benchmarks.logits import Logits, divergences, llama_cpp_logits, octavo_logits, transformers_logits
from benchmarks.peers.octavo_cpu import engine_options
from benchmarks.table import replace_between_markers

_REPOSITORY = Path(__file__).parent.parent
_TEXT = Path(__file__).with_name("text.txt")
_MAX_TOKENS = 1024
_OWN = ", its own weights"
BEGIN, END = "<!-- benchmarks.quality writes from here -->", "<!-- benchmarks.quality writes to here -->"


@dataclass
class Row:
    """Attributes:

    octavo: its divergence at each position.
    other: who was compared with, if anybody.
    others: the same of that.
    """

    what: str
    megabytes: float | None
    octavo: list[float]
    other: str | None = None
    others: list[float] | None = None

    @property
    def ratio(self) -> tuple[float, float] | None:
        """octavo's mean divergence ÷ the other's, and its standard error: the two go up and down together, and what is
        left over a few hundred positions tells how much of a ratio is luck."""
        if self.others is None:
            return None
        ratio = fmean(self.octavo) / fmean(self.others)
        rest = [ours - ratio * theirs for ours, theirs in zip(self.octavo, self.others, strict=True)]
        return ratio, (fmean(each * each for each in rest) / len(rest)) ** 0.5 / fmean(self.others)

    def summary(self) -> dict[str, object]:
        found: dict[str, object] = {"what": self.what, "megabytes": self.megabytes, "octavo": fmean(self.octavo)}
        if self.others is not None and self.ratio is not None:
            ratio, error = self.ratio
            found |= {self.other or "other": fmean(self.others), "ratio": round(ratio, 3), "error": round(error, 3)}
        return found


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.own and (args.flags or not args.files):
        parser.error("--own is of --files")
    name = args.name or _name(args.model)
    ids = _token_ids(args.model, args.tokens)
    results = args.results / f"{name}.json"
    rows = _kept(results, len(ids))
    try:
        for row in _measure(args, ids):
            if row.other is None and row.what in rows:
                row.other, row.others = rows[row.what].other, rows[row.what].others
            rows[row.what] = row
            print(json.dumps(row.summary()), flush=True)
            args.results.mkdir(parents=True, exist_ok=True)
            kept = {"tokens": len(ids), "rows": {what: asdict(each) for what, each in rows.items()}}
            results.write_text(json.dumps(kept) + "\n")
    except RuntimeError as error:
        print(f"benchmarks.quality: {error}", file=sys.stderr)
        return 1
    if args.page is not None:
        args.page.write_text(replace_between_markers(args.page.read_text(), render(args.results), BEGIN, END))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, required=True, help="the float32 model: a folder (Hugging Face form), or a GGUF file"
    )
    parser.add_argument("--files", type=Path, nargs="*", default=[], help="GGUF files of the model to compare with it")
    parser.add_argument(
        "--llama-cpp",
        metavar="PYTHON",
        help="interpreter that has its binding; without it what is known of llama.cpp stays",
    )
    parser.add_argument(
        "--own", action="store_true", help="compare each file with its own weights in float32, not with the model"
    )
    parser.add_argument(
        "--with",
        dest="flags",
        metavar="FLAGS",
        action="append",
        default=[],
        help="octavo's flags to load the model with, as in --with '--quantization int8'; may be repeated",
    )
    parser.add_argument("--reference", type=Path, help="file that keeps the float32 logits for the next time (.npz)")
    parser.add_argument("--tokens", type=int, default=_MAX_TOKENS, help="tokens of the text (at most %(default)s)")
    parser.add_argument("--name", help="how results and table call the model (default: its file name)")
    parser.add_argument("--results", type=Path, default=_REPOSITORY / "build" / "quality", help="folder of JSON files")
    parser.add_argument("--page", type=Path, help="Markdown file that has the table's two markers")
    return parser


def _name(model: Path) -> str:
    return model.stem if model.suffix == ".gguf" else model.resolve().name


def _token_ids(model: Path, count: int) -> list[int]:
    """Of the text; of a model that has no tokenizer, drawn."""
    if model.is_file():
        tokenizer = transformers.AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    elif (model / "tokenizer.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    else:
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        return random.Random(0).choices(range(vocabulary), k=count)
    found: list[int] = tokenizer(_TEXT.read_text())["input_ids"][:count]
    return found


def _reference(model: Path, ids: list[int], file: Path | None) -> Logits:
    """transformers' in float32, from ``file`` where they are kept."""
    if file is None:
        return transformers_logits(model, ids, torch.float32)
    if not file.exists():
        np.savez(file, model=_name(model), ids=ids, logits=transformers_logits(model, ids, torch.float32))
    kept = np.load(file)
    if str(kept["model"]) != _name(model) or kept["ids"].tolist() != ids:
        raise SystemExit(f"--reference {file} is of {kept['model']}, or of other tokens; name another file")
    found: Logits = kept["logits"]
    return found


def _kept(results: Path, tokens: int) -> dict[str, Row]:
    """What was found before over as many tokens."""
    found = json.loads(results.read_text()) if results.exists() else {"tokens": 0}
    return {what: Row(**fields) for what, fields in found["rows"].items()} if found["tokens"] == tokens else {}


def _measure(args: argparse.Namespace, ids: list[int]) -> Iterator[Row]:
    """The rows, as they are found."""
    exact = None if args.own else _reference(args.model, ids, args.reference)
    for file in args.files:
        of_file = exact if exact is not None else transformers_logits(file, ids, torch.float32)
        what = f"{file.name}{_OWN}" if args.own else file.name
        row = Row(what, file.stat().st_size / 1e6, divergences(of_file, octavo_logits(file, ids, engine_options(""))))
        if args.llama_cpp is not None:
            row.other, row.others = "llama.cpp", divergences(of_file, llama_cpp_logits(args.llama_cpp, file, ids))
        yield row
    if exact is None:
        return
    for flags in args.flags:
        yield Row(f"`{flags}`", None, divergences(exact, octavo_logits(args.model, ids, engine_options(flags))))
    if not args.files and not args.flags:
        ours = divergences(exact, octavo_logits(args.model, ids, engine_options("")))
        torchs = divergences(exact, transformers_logits(args.model, ids, torch.bfloat16))
        yield Row("bfloat16", None, ours, "torch", torchs)


def render(folder: Path) -> str:
    """Markdown of all models that were measured."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        lines += [f"### {path.stem} ({found['tokens']} tokens)", ""]
        lines += ["| weights | MB | octavo | beside it | octavo ÷ |", "| --- | --- | --- | --- | --- |"]
        rows = [Row(**fields) for fields in found["rows"].values()]
        for row in sorted(rows, key=lambda row: (row.megabytes is None, _OWN in row.what)):
            megabytes = "" if row.megabytes is None else f"{row.megabytes:,.0f}"
            beside = ratio = ""
            if row.others is not None and row.ratio is not None:
                beside = f"{fmean(row.others):.6f} {row.other}"
                ratio = "**{:.2f}** ± {:.2f}".format(*row.ratio)
            lines.append(f"| {row.what} | {megabytes} | {fmean(row.octavo):.6f} | {beside} | {ratio} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
