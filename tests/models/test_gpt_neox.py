"""GPT-NeoX against transformers in float32: partial rotation, both orders of attention and MLP, biases."""

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

BASE = {"family": "GPTNeoX", "hidden_size": 96, "num_key_value_heads": None}  # heads of 16


def rotated(share: float, theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}}


VARIANTS: dict[str, dict[str, Any]] = {
    "parallel": {},
    "one after the other": {"use_parallel_residual": False},
    "all rotated": rotated(1.0, 1234.5),
    "half rotated, tied": {**rotated(0.5), "tie_word_embeddings": True},
    "no attention bias": {"attention_bias": False},
    "gelu by tanh": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-2},
}
NUM_TOKENS = 100


def query_key_value(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Rows as llama.cpp wants them: all queries, all keys, all values."""
    if "query_key_value" in name:
        weight = weight.view(6, 3, 16, *weight.shape[1:]).transpose(0, 1).flatten(0, 2)
    return [(name, weight)]


def add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_rope_dimension_count(int(16 * config.rope_parameters["partial_rotary_factor"]))
    writer.add_parallel_residual(config.use_parallel_residual)
    writer.add_layer_norm_eps(config.layer_norm_eps)


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
        {"layer_norm_eps": 1e-3},
        {"use_parallel_residual": False},
        {"hidden_act": "gelu_new"},
    ],
)
def test_control_a_slightly_wrong_config_fails(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, fields: dict[str, Any]
) -> None:
    path = make_model(**BASE)
    tokens = random_tokens(NUM_TOKENS)
    expected = expected_logits(path, tokens)
    got = paged_model(changed_config(path, **fields)).chunked(tokens, NUM_TOKENS)
    with pytest.raises(AssertionError):
        assert_same(got, expected)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ("gelu by tanh", "half rotated, tied")])
def test_a_gguf_file_gives_the_logits_of_its_source(make_model: Any, check_family: Any, variant: str) -> None:
    path = make_model(**BASE, **VARIANTS[variant])
    model = write_gguf(path, "gptneox", norm_eps=False, extra=add_metadata, tensors=query_key_value)
    check_family(path, model)


def test_control_rows_of_a_gguf_file_in_the_order_of_hugging_face_fail(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any
) -> None:
    path = make_model(**BASE)
    tokens = random_tokens(40)
    model = write_gguf(path, "gptneox", norm_eps=False, extra=add_metadata)
    with pytest.raises(AssertionError):
        assert_same(paged_model(model).chunked(tokens, 40), expected_logits(path, tokens))


def test_the_old_names_of_the_rotary_settings(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any
) -> None:
    path = make_model(**BASE, **rotated(0.5, 1234.5))
    tokens = random_tokens(40)
    expected = expected_logits(path, tokens)
    changed_config(path, rope_parameters=..., rotary_pct=0.5, rotary_emb_base=1234.5)
    assert_same(paged_model(path).chunked(tokens, 17), expected)


def test_the_masks_of_old_checkpoints_are_no_weights(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any
) -> None:
    path = make_model(**BASE)
    tokens = random_tokens(40)
    expected = expected_logits(path, tokens)
    weights = load_file(path / "model.safetensors")
    for layer in range(2):
        attention = f"gpt_neox.layers.{layer}.attention."
        weights[attention + "bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        weights[attention + "masked_bias"] = torch.tensor(-1e9)
        weights[attention + "rotary_emb.inv_freq"] = torch.ones(2)
    save_file(weights, path / "model.safetensors")
    assert_same(paged_model(path).chunked(tokens, 17), expected)
    weights["gpt_neox.layers.0.attention.other"] = torch.ones(2)
    save_file(weights, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"attention\.other"):
        paged_model(path)


def test_the_merged_weight_has_a_row_for_each_channel_of_each_head(make_model: Any, paged_model: Any) -> None:
    path = make_model(**BASE)
    weights = load_file(path / "model.safetensors")
    name = "gpt_neox.layers.1.attention.query_key_value.weight"
    weights[name] = weights[name][:-16].clone()
    save_file(weights, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="272 rows, 288 are expected"):
        paged_model(path)


def test_half_a_pair_cannot_be_rotated(make_model: Any) -> None:
    path = changed_config(make_model(**BASE), **rotated(0.2))  # 3 channels of 16
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        read_model_facts(path)


@pytest.mark.parametrize("variant", ["parallel", "one after the other"])
def test_the_engine_continues_as_transformers(make_model: Any, variant: str) -> None:
    assert_engine_continues_as_transformers(make_model(**BASE, **VARIANTS[variant], vocab_size=VOCAB_SIZE))
