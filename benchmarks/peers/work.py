"""The work that every engine is given, and how it is timed. It runs under the engine's own interpreter, so it needs
nothing but Python.

A case is (streams, prompt tokens, output tokens). A round of it times the prompts with one output token, then with all
of them: what the second took more is the decoding. Each line of standard input asks for a round of the case that it
names; each line of standard output that is a JSON object is a result, the first one's about the engine itself.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Generate", "measure", "options", "read_case"]

Generate = Callable[[list[list[int]], int], Any]  # (prompts of token ids, tokens to generate from each)

MAX_STREAMS = 64
MAX_MODEL_LEN = 4096
_TOKEN_IDS = (100, 30_000)  # in every vocabulary, and no special tokens among them


def options() -> argparse.Namespace:
    """``model``, ``flags`` (octavo's), ``threads`` and ``spawned`` (when the driver started this, monotonic)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--flags", default="")
    parser.add_argument("--threads", required=True, type=int)
    parser.add_argument("--spawned", required=True, type=float)
    return parser.parse_args()


def read_case(text: str) -> tuple[int, int, int]:
    """'16x128x64' → (16, 128, 64)."""
    try:
        streams, prompt, output = (int(part) for part in text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected STREAMSxPROMPTxOUTPUT, as in 16x128x64") from error
    if not (1 <= streams <= MAX_STREAMS and prompt >= 1 and output >= 2 and prompt + output <= MAX_MODEL_LEN):
        raise argparse.ArgumentTypeError(
            f"{text!r}: at most {MAX_STREAMS} streams of {MAX_MODEL_LEN} tokens, and at least 2 output tokens"
        )
    return streams, prompt, output


def measure(args: argparse.Namespace, version: str, settings: str, generate: Generate, **facts: Any) -> None:
    """Call it as soon as the engine could take a request. ``facts``: what else is to be known of the engine."""
    _say(ready_s=time.monotonic() - args.spawned, version=version, settings=settings, **facts)
    for line in sys.stdin:
        streams, prompt_len, output_len = read_case(line.strip())
        draw = random.Random(0)
        prompts = [[draw.randrange(*_TOKEN_IDS) for _ in range(prompt_len)] for _ in range(streams)]
        _say(prefill_s=_seconds(generate, prompts, 1), total_s=_seconds(generate, prompts, output_len))


def _seconds(generate: Generate, prompts: list[list[int]], output_len: int) -> float:
    start = time.perf_counter()
    generate(prompts, output_len)
    return time.perf_counter() - start


def _say(**result: Any) -> None:
    print(json.dumps(result), file=sys.__stdout__, flush=True)
