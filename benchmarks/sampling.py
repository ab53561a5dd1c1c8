"""Sampled against greedy decoding, time per step: ``python -m benchmarks.sampling --model MODEL``. One JSON line.

Each repeat generates as many tokens greedily and sampled (temperature, top-k, top-p, a seed for each request), in turn;
prompts, and what they cost, are the same and are taken off.
"""

import argparse
import json
import time
from statistics import median
from typing import Any

from octavo import LLM, SamplingParams

_SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
_PROMPT_LEN, _OUTPUT_LEN = 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    options: dict[str, Any] = {"dtype": "bfloat16", "enable_prefix_caching": False, "max_model_len": 1024}
    with LLM(args.model, **options, max_num_seqs=args.streams) as llm:
        for sampled in (False, True):
            _seconds(llm, args.streams, sampled, 4)
        pairs = [(_step(llm, args.streams, False), _step(llm, args.streams, True)) for _ in range(args.repeats)]
    greedy, sampled = (median(each) * 1e3 for each in zip(*pairs, strict=True))
    found = {"streams": args.streams, "greedy_step_ms": round(greedy, 3), "sampled_step_ms": round(sampled, 3)}
    print(json.dumps(found | {"ratio": round(median(b / a for a, b in pairs), 3)}))


def _step(llm: LLM, streams: int, sampled: bool) -> float:
    """Seconds of a decode step."""
    prompts = _seconds(llm, streams, sampled, 1)
    return (_seconds(llm, streams, sampled, _OUTPUT_LEN) - prompts) / (_OUTPUT_LEN - 1)


def _seconds(llm: LLM, streams: int, sampled: bool, output_len: int) -> float:
    how: list[dict[str, Any]] = [_SAMPLED | {"seed": s} if sampled else {"temperature": 0} for s in range(streams)]
    params = [SamplingParams(max_tokens=output_len, ignore_eos=True, **each) for each in how]
    prompts: Any = [{"prompt_token_ids": list(range(100 + s, 100 + s + _PROMPT_LEN))} for s in range(streams)]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
