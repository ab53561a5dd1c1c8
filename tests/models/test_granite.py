"""Granite 3, and Granite 4 without experts and mamba layers, against transformers in float32."""

from collections.abc import Iterator
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from octavo.checkpoints import read_model_facts
from octavo.errors import UnsupportedError
from tests.models.folders import changed_config
from tests.models.gguf_files import write_gguf
from tests.models.through_engine import VOCAB_SIZE, assert_engine_continues_as_transformers

# No two of them alike, none of them 1.
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.45,
    "logits_scaling": 0.7,
}
DENSE = {
    "family": "GraniteMoeHybrid",
    "num_local_experts": 0,
    "layer_types": ["attention", "attention"],
    "shared_intermediate_size": 88,
    "position_embedding_type": "rope",
    "mamba_n_heads": 12,
    "mamba_d_head": 12,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "granite 3": {"family": "Granite", **MULTIPLIERS},
    # One layer: scores that nothing scales down make float32's rounding grow from layer to layer, transformers' too.
    "no multipliers": {"family": "Granite", "num_hidden_layers": 1},
    "biases, tied": {
        "family": "Granite",
        **MULTIPLIERS,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "granite 4": {**DENSE, **MULTIPLIERS},
    "granite 4, tied, bias": {**DENSE, **MULTIPLIERS, "tie_word_embeddings": True, "attention_bias": True},
    "granite 4, nope": {**DENSE, **MULTIPLIERS, "position_embedding_type": "nope"},
    "granite 4, no type": {**DENSE, **MULTIPLIERS, "position_embedding_type": None},
}
NUM_TOKENS = 100


def as_llama_cpp(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The merged weight of Granite 4 in two parts, all under Granite 3's names."""
    if name.endswith("shared_mlp.input_linear.weight"):
        for part, rows in zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True):
            yield name.replace("shared_mlp.input_linear", f"mlp.{part}"), rows
    else:
        yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), weight


def add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "granitemoehybrid":
        writer.add_feed_forward_length(config.shared_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_head_count_kv([config.num_key_value_heads] * config.num_hidden_layers)
        writer.add_ssm_inner_size(2 * config.hidden_size)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(make_model: Any, check_family: Any, variant: str) -> None:
    check_family(make_model(**VARIANTS[variant]))


@pytest.mark.parametrize("variant", ["granite 3", "granite 4"])
@pytest.mark.parametrize("field", MULTIPLIERS)
def test_control_a_slightly_wrong_multiplier_fails(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, variant: str, field: str
) -> None:
    path = make_model(**VARIANTS[variant])
    tokens = random_tokens(40)
    expected = expected_logits(path, tokens)
    got = paged_model(changed_config(path, **{field: MULTIPLIERS[field] * 1.01})).chunked(tokens, 40)
    with pytest.raises(AssertionError):
        assert_same(got, expected)


def test_control_rotating_where_nothing_is_rotated_fails(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any
) -> None:
    path = make_model(**VARIANTS["granite 4, nope"])
    tokens = random_tokens(40)
    expected = expected_logits(path, tokens)
    got = paged_model(changed_config(path, position_embedding_type="rope")).chunked(tokens, 40)
    with pytest.raises(AssertionError):
        assert_same(got, expected)


@pytest.mark.parametrize("variant", ["granite 3", "granite 4"])
def test_the_engine_continues_as_transformers(make_model: Any, variant: str) -> None:
    assert_engine_continues_as_transformers(make_model(**VARIANTS[variant], vocab_size=VOCAB_SIZE))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gguf_file_gives_the_logits_of_its_source(make_model: Any, check_family: Any, variant: str) -> None:
    path = make_model(**VARIANTS[variant])
    model = write_gguf(path, "granite", permuted=True, tensors=as_llama_cpp, extra=add_metadata)
    check_family(path, model)


@pytest.mark.parametrize(
    "key", ["attention.scale", "embedding_scale", "residual_scale", "logit_scale", "rope.scaling.finetuned"]
)
def test_control_each_number_of_a_gguf_file_counts(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, key: str
) -> None:
    def extra(writer: gguf.GGUFWriter, config: Any) -> None:
        add_metadata(writer, config)
        (entries,) = writer.kv_data
        entries[f"granite.{key}"].value = 0.4 if "scale" in key else False

    path = make_model(**VARIANTS["granite 4"])
    tokens = random_tokens(40)
    model = write_gguf(path, "granite", permuted=True, tensors=as_llama_cpp, extra=extra)
    with pytest.raises(AssertionError):
        assert_same(paged_model(model).chunked(tokens, 40), expected_logits(path, tokens))


def test_a_gguf_file_without_scales_is_a_llama(make_model: Any, check_family: Any) -> None:
    path = make_model(family="Granite", attention_multiplier=12**-0.5)
    check_family(path, write_gguf(path, "granite", permuted=True))


@pytest.mark.parametrize("spelling", ["attention", "full_attention"])
def test_layer_types_in_both_spellings(make_model: Any, spelling: str) -> None:
    path = changed_config(make_model(**DENSE), layer_types=[spelling, spelling])
    assert read_model_facts(path).architecture == "GraniteMoeHybridForCausalLM"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["attention", "mamba"]}, "layer_types.*'mamba'"),
        ({"layer_types": ["linear_attention", "attention"]}, "layer_types.*'linear_attention'"),
        ({"layer_types": None}, "layer_types"),
        ({"num_local_experts": 4}, "num_local_experts.*4"),
        ({"num_local_experts": None}, "num_local_experts"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type.*'alibi'"),
    ],
)
def test_hybrid_models_and_experts_are_refused_by_name(make_model: Any, fields: dict[str, Any], message: str) -> None:
    path = changed_config(make_model(**DENSE), **fields)
    with pytest.raises(UnsupportedError, match=message):
        read_model_facts(path)
