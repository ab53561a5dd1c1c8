"""Where a decode step's time goes: ``python -m benchmarks.steps --model MODEL [--enforce-eager]``. One JSON line for
each number of streams: microseconds a step, the median over a run's steps.

``kernels`` are timed natively, wherever they run; the other parts are Python and what it waits for: beside the kernels
of the forward and of the sampling (the head among them), scheduler, text, and the rest of the loop. A second run counts
the kernels by name, where the forward is not replayed in one call.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest.mock import patch

from octavo import LLM, SamplingParams, _native

_PARTS = ("schedule", "execute_model", "sample_tokens", "update_from_output")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--enforce-eager", action="store_true")
    args = parser.parse_args()
    options = {"dtype": "bfloat16", "enable_prefix_caching": False, "max_num_seqs": 64, "max_model_len": 1024}
    if args.enforce_eager:
        options["enforce_eager"] = True
    with LLM(args.model, **options) as llm:
        for streams in (int(text) for text in args.streams.split(",")):
            _generate(llm, streams, args.prompt_len, 4)
            found = _Steps(llm).run(lambda streams=streams: _generate(llm, streams, args.prompt_len, args.output_len))
            by_kernel = _by_kernel(lambda streams=streams: _generate(llm, streams, args.prompt_len, args.output_len))
            print(json.dumps({"streams": streams, **found, "kernels_by_name": by_kernel}), flush=True)


def _generate(llm: LLM, streams: int, prompt_len: int, output_len: int) -> None:
    prompts: Any = [{"prompt_token_ids": list(range(100 + s, 100 + s + prompt_len))} for s in range(streams)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True), use_tqdm=False)


class _Steps:
    """Times the parts of each step of an engine in this process: whole, and beside the native kernels in them."""

    def __init__(self, llm: LLM) -> None:
        self._client: Any = llm._client
        core = self._client._core
        worker = core.executor._worker
        self._owners = dict(zip(_PARTS, (core.scheduler, worker, worker, core.scheduler), strict=True))
        self._step: dict[str, float] = {}
        self._steps: list[dict[str, float]] = []

    def run(self, generate: Callable[[], None]) -> dict[str, int]:
        for name, owner in self._owners.items():
            setattr(owner, name, self._timed(getattr(owner, name), name))
        self._client.get_outputs = self._whole(self._client.get_outputs)
        try:
            generate()
        finally:
            for name, owner in self._owners.items():
                delattr(owner, name)
            del self._client.get_outputs
        # A step ends where the next begins: the first is the prompts', the last has no next.
        steps = [
            each | {"all": after["begin"] - each["begin"]}
            for each, after in zip(self._steps[1:], self._steps[2:], strict=False)
        ]
        parts = {name: median(step[name] for step in steps) for name in (*_PARTS, "kernels", "loop", "all")}
        parts["text and the rest"] = parts.pop("all") - parts.pop("loop")
        parts["step"] = median(step["all"] for step in steps)
        return {name: round(seconds * 1e6) for name, seconds in parts.items()}

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            kernels, start = _native.kernel_seconds(), time.perf_counter()
            result = call(*args)
            seconds, inside = time.perf_counter() - start, _native.kernel_seconds() - kernels
            self._step[name] = seconds - inside
            self._step["kernels"] = self._step.get("kernels", 0.0) + inside
            return result

        return timed

    def _whole(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def whole(*args: Any) -> Any:
            self._step = {"begin": time.perf_counter()}
            result = call(*args)
            self._steps.append(self._step | {"loop": time.perf_counter() - self._step["begin"]})
            return result

        return whole


def _by_kernel(generate: Callable[[], None]) -> dict[str, float]:
    """The share of each native call in all kernels' time, prompts included."""
    seconds: defaultdict[str, float] = defaultdict(float)

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            before = _native.kernel_seconds()
            result = call(*args)
            seconds[name] += _native.kernel_seconds() - before
            return result

        return count

    calls = {name: call for name, call in vars(_native).items() if callable(call) and name != "kernel_seconds"}
    with patch.multiple(_native, **{name: counted(name, call) for name, call in calls.items()}):
        generate()
    total = sum(seconds.values())
    return {name: round(spent / total, 3) for name, spent in seconds.items() if spent > total / 200}


if __name__ == "__main__":
    main()
