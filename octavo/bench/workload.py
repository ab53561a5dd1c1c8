"""Made-up requests and a loaded model: what the benchmarks share."""

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from octavo.engine import LLM, Prompt
from octavo.types import SamplingParams

__all__ = ["Timed", "loaded", "random_prompts", "run", "summary"]


@contextmanager
def loaded(engine_options: dict[str, Any], num_tokens: int, num_seqs: int) -> Iterator[LLM]:
    """A model with room for ``num_seqs`` requests of ``num_tokens``, and without prefix caching, which
    would answer the second run from the first."""
    options = {"enable_prefix_caching": False, "max_num_seqs": max(num_seqs, 1), **engine_options}
    options.setdefault("max_model_len", num_tokens)
    with LLM(**options) as llm:
        yield llm


def random_prompts(llm: LLM, count: int, length: int) -> list[Prompt]:
    """Prompts of random token ids, the same in every run."""
    draw = random.Random(0)
    vocab_size = llm.get_tokenizer().vocab_size
    return [{"prompt_token_ids": [draw.randrange(vocab_size) for _ in range(length)]} for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Timed:
    """One run. Seconds; ``first_token`` and ``last_token`` are those of the request that had them last."""

    total: float
    first_token: float
    last_token: float
    num_tokens: int
    num_steps: int


def run(llm: LLM, prompts: list[Prompt], output_len: int) -> Timed:
    """Generates exactly ``output_len`` tokens from each prompt."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    before = llm.stats()["step"]
    start = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    total = time.monotonic() - start
    times = [output.metrics for output in outputs if output.metrics is not None]
    return Timed(
        total=total,
        first_token=max(each.first_token_time for each in times) - start,
        last_token=max(each.last_token_time for each in times) - start,
        num_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        num_steps=int(llm.stats()["step"] - before),
    )


def summary(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(seconds)
    return {
        "mean": statistics.fmean(seconds) * 1e3,
        "median": statistics.median(seconds) * 1e3,
        "min": ordered[0] * 1e3,
        "max": ordered[-1] * 1e3,
    }
