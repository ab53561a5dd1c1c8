"""What models answer to ten everyday questions, greedily: ``python -m benchmarks.answers --help``. Markdown."""

import argparse
import sys
from pathlib import Path

from benchmarks.peers.octavo_cpu import engine_options
from benchmarks.table import replace_between_markers
from octavo import LLM, SamplingParams

BEGIN, END = "<!-- benchmarks.answers writes from here -->", "<!-- benchmarks.answers writes to here -->"
QUESTIONS = (
    "What is the capital of France?",
    "How many minutes are there in three hours?",
    "Write one sentence that thanks a colleague for their help.",
    "What is the difference between a fruit and a vegetable?",
    "Translate to Spanish: Where is the train station?",
    "Give me three ideas for a quick dinner with eggs.",
    "Why is the sky blue? Answer in two sentences.",
    "My laptop does not turn on. What should I check first?",
    "Write a Python function that returns the larger of two numbers.",
    "Correct the spelling: I recieved teh packege yesterday.",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answers", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", required=True, help="files, folders or names, as for octavo serve")
    parser.add_argument("--with", dest="flags", metavar="FLAGS", default="", help="octavo's: '--quantization int8'")
    parser.add_argument("--max-tokens", type=int, default=120, help="of an answer (default: 120)")
    parser.add_argument("--page", type=Path, help="Markdown file that has the two markers")
    args = parser.parse_args()
    answers = [_answers(model, args.flags, args.max_tokens) for model in args.models]
    text = _render([Path(model).name for model in args.models], answers)
    print(text)
    if args.page is not None:
        args.page.write_text(replace_between_markers(args.page.read_text(), text, BEGIN, END))
    return 0


def _answers(model: str, flags: str, max_tokens: int) -> list[str]:
    """One for each question; one that was cut off ends with "…"."""
    options = {"max_model_len": 1024} | engine_options(flags)
    with LLM(model, **options) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        outputs = [each.outputs[0] for each in llm.chat(conversations, params, use_tqdm=False)]
    return [each.text.strip() + (" …" if each.finish_reason == "length" else "") for each in outputs]


def _render(models: list[str], answers: list[list[str]]) -> str:
    lines = []
    for index, question in enumerate(QUESTIONS):
        lines += [f"**{index + 1}. {question}**", ""]
        for model, given in zip(models, answers, strict=True):
            quoted = [f"> {line}".rstrip() for line in given[index].splitlines()]
            lines += [f"*{model}:*", "", *quoted, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
