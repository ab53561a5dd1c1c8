"""The promises with a KV cache of 8 bits, and what its numbers are worth. The drawn workloads have it, too."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from octavo import LLM
from octavo.kernels.native import provider
from tests.properties.harness import PROMPT_LEN, Runner, assert_same, greedy, prompt, seeded

pytestmark = pytest.mark.parametrize("kept", ["int8", "fp8"])


@pytest.mark.parametrize(("chunk", "dtype"), [(17, "float32"), (16, "bfloat16")])
def test_chunked_prefill_changes_nothing(run: Runner, model_dir: Path, kept: str, chunk: int, dtype: str) -> None:
    options = {"kv_cache_dtype": kept, "dtype": dtype}
    whole = run(model_dir, [prompt(8)], seeded(3), **options)
    chunked = run(model_dir, [prompt(8)], seeded(3), long_prefill_token_threshold=chunk, **options)
    assert (whole.graph_modes, chunked.graph_modes) == ({"FULL"}, {"FULL"})
    assert whole.scheduled()[0] == PROMPT_LEN
    assert max(chunked.scheduled()) == chunk
    assert_same(whole.outputs[0], chunked.outputs[0])


@pytest.mark.parametrize("block_size", [16, 12])
def test_a_cached_prefix_changes_nothing(run: Runner, model_dir: Path, kept: str, block_size: int) -> None:
    options = {"kv_cache_dtype": kept, "block_size": block_size}
    plain = run(model_dir, [prompt(1)], greedy(), enable_prefix_caching=False, **options)
    cached = run(model_dir, [prompt(1)], greedy(), rounds=2, **options)
    assert cached.outputs[0].num_cached_tokens == (PROMPT_LEN - 1) // block_size * block_size
    assert_same(plain.outputs[0], cached.outputs[0])


def test_preemption_and_neighbours_change_nothing(run: Runner, model_dir: Path, kept: str) -> None:
    prompts = [prompt(seed, 300) for seed in (20, 21, 22)]
    params = [greedy(80), seeded(5, 80), seeded(6, 80)]
    options: dict[str, Any] = {"max_model_len": 400, "kv_cache_dtype": kept}
    alone = [run(model_dir, [ids], each, **options) for ids, each in zip(prompts, params, strict=True)]
    tight = run(model_dir, prompts, params, num_gpu_blocks_override=59, **options)
    assert tight.preemptions >= 1
    assert max(len(step["requests"]) for step in tight.trace) >= 2
    for one, among in zip(alone, tight.outputs, strict=True):
        assert_same(one.outputs[0], among)


def test_one_thread_and_two_give_the_same(
    run: Runner, model_dir: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for threads in (1, 2):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, threads=threads: set(range(threads)))
        found.append(run(model_dir, [prompt(30), prompt(31, 20)], greedy(), kv_cache_dtype=kept))
    for one, two in zip(found[0].outputs, found[1].outputs, strict=True):
        assert_same(one, two)


def test_the_definitions_can_do_it_too(
    run: Runner, model_dir: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And give nearly the same: a code may be another where a key has another last bit."""
    native = run(model_dir, [prompt(32, 300)], greedy(1), kv_cache_dtype=kept).outputs[0].outputs[0]
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")
    torch = run(model_dir, [prompt(32, 300)], greedy(1), kv_cache_dtype=kept).outputs[0].outputs[0]
    assert native.token_ids == torch.token_ids
    assert native.logprobs is not None
    assert torch.logprobs is not None
    for token_id, logprob in native.logprobs[0].items():
        assert torch.logprobs[0][token_id].logprob == pytest.approx(logprob.logprob, abs=2e-3)


def prompt_logprobs(model: Path, dtype: str) -> np.ndarray:
    """Of each token of a prompt."""
    with LLM(str(model), dtype="float32", kv_cache_dtype=dtype, kv_cache_memory_bytes=1 << 24) as llm:
        assert llm.config.cache.kv_cache_dtype == ("float32" if dtype == "auto" else dtype)
        output = llm.generate({"prompt_token_ids": prompt(33)}, greedy(1, prompt_logprobs=0), use_tqdm=False)[0]
    found = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
    return np.array([each[token_id].logprob for token_id, each in found])


def test_logprobs_are_near_those_of_a_wide_cache(model_dir: Path, kept: str) -> None:
    exact = prompt_logprobs(model_dir, "auto")
    error = np.abs(prompt_logprobs(model_dir, kept) - exact).mean()
    spread = exact.std()
    assert 1e-6 < error / spread < {"int8": 0.01, "fp8": 0.04}[kept]


def test_control_a_factor_that_is_wrong_for_one_token_is_noticed(
    run: Runner, llama_dir: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = provider._KERNELS["rotary_and_cache"]

    def nudged(positions: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        if len(query) == 17:  # the value's largest channel is its factor
            value = value.clone()
            value[5] *= 1.001
        found: Tensor = honest(positions, query, key, value, *others)
        return found

    monkeypatch.setitem(provider._KERNELS, "rotary_and_cache", nudged)
    settings = {"kv_cache_dtype": kept, "enforce_eager": True}  # a replayed step runs no Python in which to nudge
    whole = run(llama_dir, [prompt(8)], seeded(3), **settings)
    chunked = run(llama_dir, [prompt(8)], seeded(3), **settings, long_prefill_token_threshold=17)
    with pytest.raises(AssertionError):
        assert_same(whole.outputs[0], chunked.outputs[0])
