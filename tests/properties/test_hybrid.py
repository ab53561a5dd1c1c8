"""A toy of one full-attention and one sliding-window layer, through the whole engine: two KV cache groups, one pool.

The toy is the Llama of the other property tests with a window in its second layer.
"""

from pathlib import Path
from typing import Any

import pytest

from octavo.models import llama
from tests.properties.harness import PROMPT_LEN, Runner, assert_same, greedy, prompt, seeded, with_window

WINDOW = 101


@pytest.fixture
def hybrid_dir(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(llama, "Attention", with_window(WINDOW))
    return llama_dir


def test_a_cached_prefix_serves_both_groups(run: Runner, hybrid_dir: Path) -> None:
    prompts = [prompt(60)]
    plain = run(hybrid_dir, prompts, greedy(), enable_prefix_caching=False)
    cached = run(hybrid_dir, prompts, greedy(), rounds=2)
    assert cached.outputs[0].num_cached_tokens == (PROMPT_LEN - 1) // 16 * 16
    assert_same(plain.outputs[0], cached.outputs[0])


@pytest.mark.parametrize("chunk", [16, 17, 150])
def test_chunks_change_nothing(run: Runner, hybrid_dir: Path, chunk: int) -> None:
    whole = run(hybrid_dir, [prompt(61)], seeded(3))
    chunked = run(hybrid_dir, [prompt(61)], seeded(3), long_prefill_token_threshold=chunk)
    assert max(chunked.scheduled()) == chunk
    assert_same(whole.outputs[0], chunked.outputs[0])


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_changes_nothing(run: Runner, hybrid_dir: Path, overlap: bool) -> None:
    prompts = [prompt(seed, 300) for seed in (62, 63, 64)]
    params = [greedy(80), seeded(5, 80), seeded(6, 80)]
    options: dict[str, Any] = {"max_model_len": 400, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    roomy = run(hybrid_dir, prompts, params, async_scheduling=overlap, **options)
    tight = run(hybrid_dir, prompts, params, async_scheduling=overlap, num_gpu_blocks_override=60, **options)
    assert roomy.preemptions == 0
    assert tight.preemptions >= 1
    for a, b in zip(roomy.outputs, tight.outputs, strict=True):
        assert_same(a, b)


def test_the_window_gives_blocks_back(run: Runner, hybrid_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request holds fewer blocks than two full layers' groups would."""
    options: dict[str, Any] = {"long_prefill_token_threshold": 64, "enable_prefix_caching": False}
    hybrid = run(hybrid_dir, [prompt(65)], greedy(4), **options)
    held = hybrid.trace[-1]["used_blocks"]
    full_blocks = -(-(PROMPT_LEN + 3) // 16)
    assert full_blocks < held <= full_blocks + (WINDOW + 15) // 16 + 1
    monkeypatch.setattr(llama, "Attention", with_window(None))
    full = run(hybrid_dir, [prompt(65)], greedy(4), **options)
    assert full.trace[-1]["used_blocks"] == full_blocks  # one group of both layers


def test_control_the_window_matters(run: Runner, hybrid_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = run(hybrid_dir, [prompt(66)], greedy()).outputs[0]
    monkeypatch.setattr(llama, "Attention", with_window(None))
    full = run(hybrid_dir, [prompt(66)], greedy()).outputs[0]
    with pytest.raises(AssertionError):
        assert_same(hybrid, full)
