"""Full-attention and sliding-window layers through the whole engine: several KV cache groups, one pool.

The toy is the Llama of the other property tests with a window in its second layer: two groups. A Gemma 3 of five
windows and two full layers makes four, one of them with a layer less.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.models import llama
from tests.properties.harness import (
    PROMPT_LEN,
    SHAPE,
    Runner,
    assert_same,
    greedy,
    prompt,
    save_model,
    seeded,
    with_window,
)

WINDOW = 101


WINDOW_BLOCKS = -(-WINDOW // 16) + 1


@pytest.fixture
def toy_dir(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(llama, "Attention", with_window(WINDOW))
    return llama_dir


@pytest.fixture(scope="session")
def gemma3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 7},
        layer_types=layers + layers[1:],
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        pad_token_id=None,
    )
    return save_model(tmp_path_factory.mktemp("gemma3"), transformers.Gemma3ForCausalLM(config).float())


@pytest.fixture(params=["toy", "gemma3"])
def hybrid_dir(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(f"{request.param}_dir")
    return found


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
    # Less than what two requests hold at their full length, more than what the second is admitted with.
    blocks, budget = (60, 64) if "llama" in hybrid_dir.name else (92, 16)
    options: dict[str, Any] = {"max_model_len": 400, "max_num_batched_tokens": budget, "max_num_seqs": 8}
    roomy = run(hybrid_dir, prompts, params, async_scheduling=overlap, **options)
    tight = run(hybrid_dir, prompts, params, async_scheduling=overlap, num_gpu_blocks_override=blocks, **options)
    assert roomy.preemptions == 0
    assert tight.preemptions >= 1
    for a, b in zip(roomy.outputs, tight.outputs, strict=True):
        assert_same(a, b)


def test_the_window_gives_blocks_back(run: Runner, toy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request holds fewer blocks than two full layers' groups would."""
    options: dict[str, Any] = {"long_prefill_token_threshold": 64, "enable_prefix_caching": False}
    hybrid = run(toy_dir, [prompt(65)], greedy(4), **options)
    held = hybrid.trace[-1]["used_blocks"]
    full_blocks = -(-(PROMPT_LEN + 3) // 16)
    assert full_blocks < held <= full_blocks + WINDOW_BLOCKS
    monkeypatch.setattr(llama, "Attention", with_window(None))
    full = run(toy_dir, [prompt(65)], greedy(4), **options)
    assert full.trace[-1]["used_blocks"] == full_blocks  # one group of both layers


def test_every_group_of_windows_gives_blocks_back(run: Runner, gemma3_dir: Path) -> None:
    options: dict[str, Any] = {"long_prefill_token_threshold": 64, "enable_prefix_caching": False}
    held = run(gemma3_dir, [prompt(65)], greedy(4), **options).trace[-1]["used_blocks"]
    full_blocks = -(-(PROMPT_LEN + 3) // 16)
    assert full_blocks < held <= full_blocks + 3 * WINDOW_BLOCKS


def test_control_the_window_matters(run: Runner, toy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = run(toy_dir, [prompt(66)], greedy()).outputs[0]
    monkeypatch.setattr(llama, "Attention", with_window(None))
    full = run(toy_dir, [prompt(66)], greedy()).outputs[0]
    with pytest.raises(AssertionError):
        assert_same(hybrid, full)
