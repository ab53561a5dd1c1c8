"""Every family's forward is recorded whole, and its replay gives the bits of the model's own Python, over chunks,
decodes, preemption and what is left of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.models.test_bitwise import MODELS
from tests.properties.harness import assert_same, byte_tokenizer, prompt

SETTINGS: dict[str, Any] = {
    "kv_cache_memory_bytes": 1 << 21,
    "disable_log_stats": True,
    "enable_prefix_caching": False,
    "max_model_len": 160,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 40,
}
LENGTHS = (3, 70, 41, 1, 120, 64, 90, 33)
# Steps of so many rows that each thread goes through a layer by itself.
LONG_LENGTHS = (700, 3, 300, 64, 650, 280)
LONG: dict[str, Any] = {"max_model_len": 760, "max_num_batched_tokens": 1024, "kv_cache_memory_bytes": 1 << 25}


def generate(
    folder: Path, trace: Path, lengths: tuple[int, ...] = LENGTHS, **settings: Any
) -> tuple[list[Any], set[str], int]:
    """(outputs, modes of the steps, preemptions)."""
    prompts: list[Any] = [
        {"prompt_token_ids": [token % 300 for token in prompt(seed, length)]} for seed, length in enumerate(lengths)
    ]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=3, ignore_eos=True, detokenize=False)
    with LLM(str(folder), step_trace=str(trace), **(SETTINGS | settings)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    return outputs, {step["graph_mode"] for step in steps}, sum(len(step["preempted"]) for step in steps)


@pytest.mark.parametrize("name", MODELS)
def test_a_replayed_step_has_the_bits_of_the_models_python(
    make_model: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    folder = make_model(dtype="bfloat16", **MODELS[name])
    byte_tokenizer(folder)
    few_blocks = {"num_gpu_blocks_override": 13, "kv_cache_memory_bytes": None} if name == "llama" else {}
    replayed, modes, preempted = generate(folder, tmp_path / "replayed", **few_blocks)
    eager, eager_modes, _ = generate(folder, tmp_path / "eager", enforce_eager=True, **few_blocks)
    assert (modes, eager_modes) == ({"FULL"}, {"EAGER"})
    assert preempted > 0 or not few_blocks
    for left, right in zip(replayed, eager, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_many_rows_are_no_different(make_model: Callable[..., Path], tmp_path: Path, name: str) -> None:
    folder = make_model(dtype="bfloat16", **MODELS[name])
    byte_tokenizer(folder)
    replayed, modes, _ = generate(folder, tmp_path / "replayed", LONG_LENGTHS, **LONG)
    eager, _, _ = generate(folder, tmp_path / "eager", LONG_LENGTHS, enforce_eager=True, **LONG)
    assert modes == {"FULL"}
    for left, right in zip(replayed, eager, strict=True):
        assert_same(left, right)
