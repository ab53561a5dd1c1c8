"""Every family gives the same logits to the last bit with native kernels, whole and in chunks, alone and in a crowd.

The prompt reaches into a second partition of attention and is longer than the windows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.models import REGISTRY
from tests.models import test_gemma, test_gpt_neox, test_granite, test_olmo2, test_phi3, test_smollm3, test_stablelm

NUM_TOKENS = 280
WINDOW = {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "gemma 2": test_gemma.gemma2(),
    "gemma 3": test_gemma.gemma3(),
    "gpt_neox": test_gpt_neox.BASE,
    "gpt_neox, sequential": {**test_gpt_neox.BASE, "use_parallel_residual": False},
    "granite 3": test_granite.VARIANTS["granite 3"],
    "granite 4": test_granite.VARIANTS["granite 4"],
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"family": "Mistral", "sliding_window": 23},
    "olmo 2": test_olmo2.BASE,
    "phi3": {**test_phi3.BASE, **test_phi3.rotated(0.75)},
    "qwen2": {"family": "Qwen2", **WINDOW},
    "qwen3": {"family": "Qwen3", "head_dim": 16, **WINDOW},
    "smollm3": {**test_smollm3.BASE, **test_smollm3.WINDOWED},
    "stablelm": {**test_stablelm.BASE, "qk_layernorm": True, "use_qkv_bias": True},
    "stablelm, parallel": {**test_stablelm.BASE, "qk_layernorm": True, "use_parallel_residual": True},
}


def assert_same_bits(model: Any, tokens: list[int], whole: Tensor) -> None:
    for chunk_size in (1, 16, 17):
        assert torch.equal(model.chunked(tokens, chunk_size), whole), chunk_size
    crowd = [("subject", tokens), *((index, tokens[index : 40 * index]) for index in (1, 2, 3))]
    assert torch.equal(model.step(crowd)[: len(tokens)], whole), "in a crowd"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_have_the_same_bits_however_they_are_computed(
    make_model: Callable[..., Path], paged_model: Any, random_tokens: Any, name: str, dtype: str
) -> None:
    model = paged_model(make_model(**MODELS[name]), dtype=dtype)
    assert kernels.chosen_provider() == "native"
    tokens = random_tokens(NUM_TOKENS)
    whole = model.chunked(tokens, NUM_TOKENS)
    assert whole.isfinite().all()
    assert_same_bits(model, tokens, whole)


def test_every_family_is_there() -> None:
    named = {f"{fields.get('family', 'Llama')}ForCausalLM" for fields in MODELS.values()}
    assert named == set(REGISTRY) - {"Gemma3ForConditionalGeneration"}  # another name of Gemma3ForCausalLM


def test_control_sums_in_the_order_of_torch_have_other_bits(
    make_model: Callable[..., Path], paged_model: Any, random_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its products take another order for one row than for many."""
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")
    model = paged_model(make_model())
    assert kernels.chosen_provider() == "torch"
    tokens = random_tokens(NUM_TOKENS)
    with pytest.raises(AssertionError):
        assert_same_bits(model, tokens, model.chunked(tokens, NUM_TOKENS))
