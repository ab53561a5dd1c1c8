"""StableLM against transformers in float32: partial rotation, parallel residual, norms of the heads."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.checkpoints import read_model_facts
from octavo.errors import CheckpointError
from tests.models.folders import changed_config
from tests.models.gguf_files import write_gguf
from tests.models.through_engine import VOCAB_SIZE, assert_engine_continues_as_transformers

BASE = {"family": "StableLm", "hidden_size": 96}  # heads of 16


def rotated(share: float, theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}}


VARIANTS: dict[str, dict[str, Any]] = {
    "a quarter rotated": {},
    "half rotated": rotated(0.5, 1234.5),
    "all rotated": rotated(1.0),
    "qkv bias, tied": {"use_qkv_bias": True, "tie_word_embeddings": True},
    "norms of heads": {"qk_layernorm": True},
    "parallel": {"use_parallel_residual": True, "layer_norm_eps": 1e-2},
    "parallel, norms of heads, bias": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
}
NUM_TOKENS = 100


def stacked_norms() -> Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """The norms of a layer's heads as llama.cpp wants them: one matrix."""
    found: dict[str, list[Tensor]] = {}

    def convert(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        merged, _, head = name.removesuffix(".weight").partition(".norms.")
        if not head:
            yield name, weight
            return
        rows = found.setdefault(merged, [])
        assert len(rows) == int(head)
        rows.append(weight)
        if len(rows) == (6 if merged.endswith("q_layernorm") else 2):
            yield f"{merged}.weight", torch.stack(rows)

    return convert


def to_gguf(folder: Path, rotary_dim: int | None = None) -> Path:
    def extra(writer: gguf.GGUFWriter, config: Any) -> None:
        share = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(rotary_dim or int(16 * share))
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_parallel_residual(True)  # as the converter writes for a config that does not say

    return write_gguf(folder, "stablelm", norm_eps=False, extra=extra, tensors=stacked_norms())


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(make_model: Any, check_family: Any, variant: str) -> None:
    check_family(make_model(**BASE, **VARIANTS[variant]))


@pytest.mark.parametrize(
    "fields",
    [
        rotated(0.5),
        rotated(0.25, 10100.0),
        {"layer_norm_eps": 1.5e-2},
    ],
)
def test_control_a_slightly_wrong_config_fails(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, fields: dict[str, Any]
) -> None:
    path = make_model(**BASE, **VARIANTS["parallel"])
    tokens = random_tokens(NUM_TOKENS)
    expected = expected_logits(path, tokens)
    got = paged_model(changed_config(path, **fields)).chunked(tokens, NUM_TOKENS)
    with pytest.raises(AssertionError):
        assert_same(got, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gguf_file_gives_the_logits_of_its_source(make_model: Any, check_family: Any, variant: str) -> None:
    path = make_model(**BASE, **VARIANTS[variant])
    check_family(path, to_gguf(path))


def test_control_another_rotary_length_in_a_gguf_file_fails(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any
) -> None:
    path = make_model(**BASE)
    tokens = random_tokens(40)
    with pytest.raises(AssertionError):
        assert_same(paged_model(to_gguf(path, rotary_dim=6)).chunked(tokens, 40), expected_logits(path, tokens))


@pytest.mark.parametrize("name", ["q_layernorm.norms.5", "k_layernorm.norms.0"])
def test_a_missing_norm_of_a_head_is_named(make_model: Any, paged_model: Any, name: str) -> None:
    path = make_model(**BASE, qk_layernorm=True)
    weights = load_file(path / "model.safetensors")
    del weights[f"model.layers.1.self_attn.{name}.weight"]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}.weight.*missing"):
        paged_model(path)


def test_control_norms_of_heads_in_another_order_fail(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any
) -> None:
    path = make_model(**BASE, qk_layernorm=True)
    tokens = random_tokens(40)
    expected = expected_logits(path, tokens)
    weights = load_file(path / "model.safetensors")
    first, second = (f"model.layers.1.self_attn.q_layernorm.norms.{head}.weight" for head in (0, 3))
    weights[first], weights[second] = weights[second], weights[first]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(AssertionError):
        assert_same(paged_model(path).chunked(tokens, 40), expected)


def test_a_config_of_its_first_days_has_the_factor_outside(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any
) -> None:
    path = make_model(**BASE, **rotated(0.5))
    tokens = random_tokens(40)
    expected = expected_logits(path, tokens)
    changed_config(path, rope_parameters=None, rope_theta=10000, partial_rotary_factor=0.5)
    assert_same(paged_model(path).chunked(tokens, 17), expected)


def test_half_a_pair_cannot_be_rotated(make_model: Any) -> None:
    path = changed_config(make_model(**BASE), **rotated(0.2))  # 3 channels of 16
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        read_model_facts(path)


@pytest.mark.parametrize("variant", ["a quarter rotated", "parallel, norms of heads, bias"])
def test_the_engine_continues_as_transformers(make_model: Any, variant: str) -> None:
    assert_engine_continues_as_transformers(make_model(**BASE, **VARIANTS[variant], vocab_size=VOCAB_SIZE))
