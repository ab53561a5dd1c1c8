"""Qwen2 and Qwen3: tiny random models from Hugging Face and GGUF form against transformers, and through the engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from octavo.checkpoints import read_model_facts
from octavo.errors import CheckpointError, UnsupportedError
from tests.models.folders import changed_config
from tests.models.gguf_files import write_gguf
from tests.models.through_engine import VOCAB_SIZE, assert_engine_continues_as_transformers

WINDOWED = {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 1, "num_hidden_layers": 3}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# As published models ask for it where prompts are longer than those that they were trained with.
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "Qwen2"},
    "qwen2, tied": {"family": "Qwen2", "tie_word_embeddings": True},
    "qwen2, yarn": {"family": "Qwen2", "head_dim": 12, "rope_parameters": YARN},
    "qwen2, upper layers with a window": {"family": "Qwen2", **WINDOWED},
    "qwen2, every layer with a window": {"family": "Qwen2", **WINDOWED, "max_window_layers": 0},
    "qwen2, alternating": {"family": "Qwen2", **WINDOWED, **ALTERNATING},
    "qwen3": {"family": "Qwen3", "head_dim": 16},
    "qwen3, biases, tied": {"family": "Qwen3", "head_dim": 40, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3, upper layers with a window": {"family": "Qwen3", "head_dim": 16, **WINDOWED},
}
MakeModel = Callable[..., Path]
FAMILIES = ["qwen2", "qwen3"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(make_model: MakeModel, check_family: Any, variant: str) -> None:
    check_family(make_model(**VARIANTS[variant]))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_gives_the_logits_of_its_source(
    make_model: MakeModel, check_family: Any, family: str, tied: bool
) -> None:
    folder = make_model(**VARIANTS[family], tie_word_embeddings=tied)
    check_family(folder, gguf=write_gguf(folder, family))


def test_a_gguf_file_says_yarn_in_its_metadata(make_model: MakeModel, check_family: Any) -> None:
    def scaling(writer: gguf.GGUFWriter, config: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(YARN["factor"])
        writer.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])

    folder = make_model(**VARIANTS["qwen2, yarn"])
    check_family(folder, gguf=write_gguf(folder, "qwen2", extra=scaling))
    with pytest.raises(AssertionError, match="not close"):
        check_family(folder, gguf=write_gguf(folder, "qwen2"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_count", 8, "expert_count = 8 is not supported"),
        ("attn_logit_softcapping", 50.0, "attn_logit_softcapping = 50.0 is not supported"),
        ("rope.dimension_count", 6, "rope.dimension_count 6 is not the head's length 12"),
        ("vocab_size", 301, None),
    ],
)
def test_arithmetic_of_other_families_is_refused_by_name(
    make_model: MakeModel, key: str, value: float, message: str | None
) -> None:
    def extra(writer: gguf.GGUFWriter, config: Any) -> None:
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"qwen2.{key}", value)

    path = write_gguf(make_model(**VARIANTS["qwen2"]), "qwen2", extra=extra)
    if message is None:
        assert read_model_facts(path).architecture == "Qwen2ForCausalLM"
    else:
        with pytest.raises(UnsupportedError, match=f"qwen2.{message}"):
            read_model_facts(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_control_rows_in_a_llamas_order_are_wrong(make_model: MakeModel, check_family: Any, family: str) -> None:
    folder = make_model(**VARIANTS[family])
    with pytest.raises(AssertionError, match="not close"):
        check_family(folder, gguf=write_gguf(folder, family, permuted=True))


@pytest.mark.parametrize("variant", ["qwen2", "qwen2, upper layers with a window", "qwen3"])
def test_the_engine_continues_as_transformers(make_model: MakeModel, variant: str) -> None:
    assert_engine_continues_as_transformers(make_model(**VARIANTS[variant], vocab_size=VOCAB_SIZE))


def test_a_gguf_file_through_the_engine(make_model: MakeModel) -> None:
    folder = make_model(**VARIANTS["qwen3"], vocab_size=VOCAB_SIZE)
    assert_engine_continues_as_transformers(folder, write_gguf(folder, "qwen3"))


@pytest.mark.parametrize(
    "fields",
    [{"sliding_window": 24}, {"max_window_layers": 0}, {"max_window_layers": 2}, {"use_sliding_window": False}],
)
def test_control_another_window_or_other_layers_with_it_are_wrong(
    make_model: MakeModel, paged_model: Any, expected_logits: Any, random_tokens: Any, fields: dict[str, Any]
) -> None:
    folder = make_model(**VARIANTS["qwen2, upper layers with a window"])
    tokens = random_tokens(60)
    expected = expected_logits(folder, tokens)
    got = paged_model(changed_config(folder, layer_types=None, **fields)).chunked(tokens, 60)
    assert (got - expected).abs().max() > 1e-3


def test_control_qwen3_norms_query_and_key_each_on_its_own(
    make_model: MakeModel, paged_model: Any, expected_logits: Any, random_tokens: Any
) -> None:
    folder = make_model(**VARIANTS["qwen3"])
    tokens = random_tokens(60)
    model = paged_model(folder)
    attention = model.model.model.layers[1].self_attn
    attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm
    got = model.chunked(tokens, 60)
    assert (got - expected_logits(folder, tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_fields_that_are_left_out_have_the_values_of_the_class(make_model: MakeModel, family: str) -> None:
    import transformers

    folder = make_model(family=family, head_dim=16, num_attention_heads=32, num_key_value_heads=32, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    kept = ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    left = {key: config[key] for key in (*kept, "num_hidden_layers")}
    if family == "Qwen2":
        left["head_dim"] = 16
    (folder / "config.json").write_text(json.dumps(left))
    found = read_model_facts(folder).hf_config
    reference = getattr(transformers, f"{family}Config")(**left)
    for key in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "head_dim", "tie_word_embeddings"):
        assert found[key] == getattr(reference, key), key
    assert found["rope_theta"] == reference.rope_parameters["rope_theta"]
    assert found["sliding_window"] is reference.sliding_window is None
    assert found["layer_types"] == reference.layer_types


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"layer_types": ["full_attention"]}, CheckpointError, "layer_types must be a list of 3 names"),
        ({"layer_types": "full_attention"}, CheckpointError, "layer_types must be a list of 3 names"),
        ({"layer_types": ["full_attention", "mamba", "full_attention"]}, UnsupportedError, "layer_types: 'mamba'"),
        ({"sliding_window": 0}, CheckpointError, "sliding_window must be a whole number from 1"),
        ({"use_sliding_window": 1}, CheckpointError, "use_sliding_window must be true or false"),
        ({"max_window_layers": -1, "layer_types": None}, CheckpointError, "max_window_layers must be a whole number"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act 'gelu' is not supported; supported: silu"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_cannot_be_right_are_named(
    make_model: MakeModel, family: str, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = changed_config(make_model(**{**VARIANTS[family], **WINDOWED}), **fields)
    with pytest.raises(error, match=message):
        read_model_facts(folder)


def test_layers_with_and_without_a_window_are_seen_by_the_cache(make_model: MakeModel, paged_model: Any) -> None:
    model = paged_model(make_model(**VARIANTS["qwen2, upper layers with a window"]))
    assert [layer.sliding_window for layer in model.layers.values()] == [None, 23, 23]
