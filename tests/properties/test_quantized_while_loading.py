"""The promises with weights that are quantized while they are loaded: chunks, neighbours, cached prefixes and
preemption change no bit. And the model is still the same model."""

import math
from pathlib import Path

import pytest

from octavo.platforms import current_platform
from tests.properties.harness import PROMPT_LEN, Runner, assert_same, greedy, prompt, seeded

pytestmark = [
    pytest.mark.skipif(current_platform().kernel_provider != "native", reason="the native kernels were not built"),
    pytest.mark.parametrize("quantization", ["int8", "int4"]),
]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_chunked_prefill_changes_nothing(run: Runner, model_dir: Path, quantization: str, enforce_eager: bool) -> None:
    options = {"dtype": "bfloat16", "quantization": quantization, "enforce_eager": enforce_eager}
    whole = run(model_dir, [prompt(80)], seeded(3), **options)
    chunked = run(model_dir, [prompt(80)], seeded(3), **options, long_prefill_token_threshold=17)
    assert whole.graph_modes == {"EAGER" if enforce_eager else "FULL"}
    assert whole.scheduled()[0] == PROMPT_LEN
    assert max(chunked.scheduled()) == 17
    assert_same(whole.outputs[0], chunked.outputs[0])


def test_a_request_alone_equals_the_same_among_neighbours(run: Runner, model_dir: Path, quantization: str) -> None:
    prompts = [prompt(81, 90), prompt(82), prompt(83, 1), prompt(84, 300)]
    params = [seeded(1, 40), greedy(), greedy(30), seeded(2, 5)]
    options = {"dtype": "bfloat16", "quantization": quantization}
    alone = run(model_dir, prompts[1:2], greedy(), **options)
    among = run(model_dir, prompts, params, **options, max_num_batched_tokens=256, max_num_seqs=8)
    assert max(len(step["requests"]) for step in among.trace) >= 3
    assert_same(alone.outputs[0], among.outputs[1])


def test_a_cached_prefix_changes_nothing(run: Runner, llama_dir: Path, quantization: str) -> None:
    options = {"dtype": "float32", "quantization": quantization}
    plain = run(llama_dir, [prompt(85)], greedy(), **options, enable_prefix_caching=False)
    cached = run(llama_dir, [prompt(85)], greedy(), **options, rounds=2)
    assert cached.outputs[0].num_cached_tokens == (PROMPT_LEN - 1) // 16 * 16
    assert_same(plain.outputs[0], cached.outputs[0])


def test_preemption_changes_nothing(run: Runner, llama_dir: Path, quantization: str) -> None:
    prompts, params = [prompt(seed, 300) for seed in (86, 87, 88)], [greedy(80), seeded(5, 80), seeded(6, 80)]
    options = {"quantization": quantization, "max_model_len": 400, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    roomy = run(llama_dir, prompts, params, **options)
    tight = run(llama_dir, prompts, params, **options, num_gpu_blocks_override=44)
    assert (roomy.preemptions, tight.preemptions >= 1) == (0, True)
    for a, b in zip(roomy.outputs, tight.outputs, strict=True):
        assert_same(a, b)


def test_the_model_is_still_the_same(run: Runner, llama_dir: Path, quantization: str) -> None:
    """Its logprobs are near the wide model's, and not the same."""
    params = greedy(1, prompt_logprobs=0)
    found = [run(llama_dir, [prompt(89)], params, quantization=each).outputs[0] for each in ("none", quantization)]
    wide, kept = ([next(iter(each.values())).logprob for each in (out.prompt_logprobs or [])[1:]] for out in found)
    assert len(wide) == PROMPT_LEN - 1
    off = math.sqrt(sum((a - b) ** 2 for a, b in zip(wide, kept, strict=True)) / len(wide))
    spread = math.sqrt(sum((a - sum(wide) / len(wide)) ** 2 for a in wide) / len(wide))
    assert 0 < off < {"int8": 0.05, "int4": 0.3}[quantization] * spread
