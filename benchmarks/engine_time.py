"""Where the engine's own time goes: ``python -m benchmarks.engine_time [--model MODEL]``.

A whole ``LLM``, with a worker that computes nothing: it keeps the real InputBatch and gives tokens of a real text. So
a step costs what it costs beside forward and sampler. Microseconds a decode step, by section: the mean over a run,
which holds all that does not come with every step, in the best of some runs. In place of the forward the worker reads
as many bytes as a model has weights, and is not counted: it leaves the caches as a forward does.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from octavo.config import OctavoConfig
from octavo.engine import LLM
from octavo.executor import UniProcExecutor
from octavo.types import (
    EngineCoreOutputs,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
)
from octavo.worker.input_batch import InputBatch

STREAMS = (1, 16, 64)
PROMPT_LEN, OUTPUT_LEN = 32, 129
TEXT = """Every afternoon, as they were coming from school, the children used to go and play in the Giant's garden.
It was a large lovely garden, with soft green grass; naïve façades, 12 peach-trees, and in the spring-time — “pink and
pearl” — delicate blossoms 🌸. The birds sat on the trees and sang so sweetly that the children used to stop their games
in order to listen to them. “How happy we are here!” they cried to each other. """

SECTIONS = ("schedule", "batch", "update", "output and text", "the rest", "all")


class CannedWorker:
    """A worker whose tokens are given: each request goes through ``tokens`` again and again."""

    def __init__(self, config: OctavoConfig) -> None:
        self._config = config

    def init_device(self) -> None: ...

    def load_model(self, progress: Callable[[str, float], None] | None = None) -> str:
        return "none"

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {
            "layer": FullAttentionSpec(
                block_size=self._config.cache.block_size, num_kv_heads=1, head_size=8, dtype="float32"
            )
        }

    def determine_available_memory(self) -> int:
        return 1 << 28

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        self.batch = InputBatch(
            self._config.scheduler.max_num_seqs,
            max_model_len,
            self._config.model.vocab_size,
            [group.spec.block_size for group in kv_cache_config.groups],
        )
        self.tokens = np.zeros(1, dtype=np.int64)
        self.weights = np.zeros(0, dtype=np.float32)

    def compile_or_warm_up_model(self) -> None: ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.batch.apply(scheduler_output)
        self._req_ids = list(scheduler_output.num_scheduled_tokens)
        self._rows = self.batch.rows(self._req_ids)

    def forward(self) -> NDArray[np.int64]:
        places = self.batch.num_tokens[self._rows] % len(self.tokens)
        self.weights.sum()
        return self.tokens[places]

    def sample_tokens(self) -> ModelRunnerOutput:
        token_ids = self.forward()
        self.batch.append_tokens(self._rows, token_ids)
        count = len(self._req_ids)
        return ModelRunnerOutput(self._req_ids, [[token_id] for token_id in token_ids.tolist()], [None] * count)

    def shutdown(self) -> None: ...


class Sections:
    """Seconds by section, which don't overlap. While it is entered, calls are timed; that costs the sections around
    them something, so the sum is taken without.

    Args:
        methods: (object, method, section).
    """

    def __init__(self, *methods: tuple[Any, str, str]) -> None:
        self.seconds: dict[str, float] = {}
        self._methods = methods

    def __enter__(self) -> "Sections":
        for owner, method, section in self._methods:
            setattr(owner, method, self._timed(getattr(owner, method), section))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, method, _section in self._methods:
            delattr(owner, method)

    def _timed(self, call: Callable[..., Any], section: str) -> Callable[..., Any]:
        clock = time.perf_counter

        def timed(*args: Any) -> Any:
            start = clock()
            try:
                return call(*args)
            finally:
                self.seconds[section] = self.seconds.get(section, 0.0) + clock() - start

        return timed


def measure(llm: LLM, streams: int, params: SamplingParams, sections: Sections) -> dict[str, float]:
    """Microseconds a step: of each section, and of ``all`` but the forward."""
    llm.reset_prefix_cache()
    get_outputs = llm._client.get_outputs
    prompts: list[Any] = [{"prompt_token_ids": list(range(stream, stream + PROMPT_LEN))} for stream in range(streams)]
    start, num_steps = 0.0, -1  # the first step is the prompts'

    def counted() -> EngineCoreOutputs:
        nonlocal start, num_steps
        num_steps += 1
        if num_steps == 1:
            sections.seconds.clear()
            start = time.perf_counter()
        return get_outputs()

    with sections, patch.object(llm._client, "get_outputs", counted):
        llm.generate(prompts, params, use_tqdm=False)
    found = {"all": time.perf_counter() - start, **sections.seconds}
    found["all"] -= found.pop("forward")
    return {name: seconds / num_steps * 1e6 for name, seconds in found.items()}


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    return min(runs, key=lambda run: run["all"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--weights-mb", type=int, default=128, help="what the worker reads in a step; 0: warm caches")
    args = parser.parse_args()
    with patch("octavo.engine.core.make_executor", lambda config: UniProcExecutor(config, CannedWorker(config))):
        llm = LLM(args.model, max_num_seqs=max(STREAMS), max_model_len=PROMPT_LEN + OUTPUT_LEN + 1)
    core: Any = llm._client._core  # type: ignore[attr-defined]
    worker: Any = core.executor._worker
    worker.tokens = np.array(llm.get_tokenizer().encode(TEXT))
    worker.weights = np.zeros(args.weights_mb << 18, dtype=np.float32) + 1
    forward = (worker, "forward", "forward")
    by_section = Sections(
        forward,
        (core.scheduler, "schedule", "schedule"),
        *[(worker.batch, method, "batch") for method in ("apply", "rows", "append_tokens")],
        (core.scheduler, "update_from_output", "update"),
        (llm._output_processor, "process", "output and text"),
    )
    kinds = {
        "": SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True),
        "2 stop strings": SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, stop=["\n\n", "###"]),
        "ids only": SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False),
    }
    print("| streams | " + " | ".join(SECTIONS) + " |\n|" + "---|" * (len(SECTIONS) + 1))
    for kind, params in kinds.items():
        for streams in STREAMS:
            found = best([measure(llm, streams, params, by_section) for _ in range(args.repeats)])
            found["all"] = best([measure(llm, streams, params, Sections(forward)) for _ in range(args.repeats)])["all"]
            found["the rest"] = 2 * found["all"] - sum(found.values())
            cells = " | ".join(f"{found[section]:.0f}" for section in SECTIONS)
            print(f"| {streams}{', ' if kind else ''}{kind} | {cells} |", flush=True)
    llm.shutdown()


if __name__ == "__main__":
    main()
