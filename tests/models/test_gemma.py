"""Gemma 2 and 3 against transformers in float32, from Hugging Face folders and from GGUF files.

Windows are shorter than the prompts and end within blocks; caps are low enough to bend what they are put on.
"""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo.checkpoints import read_model_facts
from octavo.errors import CheckpointError, UnsupportedError
from tests.models.folders import changed_config
from tests.models.gguf_files import write_gguf
from tests.models.through_engine import VOCAB_SIZE, assert_engine_continues_as_transformers

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0}


def gemma2(**fields: Any) -> dict[str, Any]:
    base = {
        "family": "Gemma2",
        "norm_mean": 0.0,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 23,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
    }
    return base | fields


def gemma3(**fields: Any) -> dict[str, Any]:
    base = {
        "family": "Gemma3",
        "norm_mean": 0.0,
        "config": "Gemma3TextConfig",
        "num_hidden_layers": 7,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 23,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING],
        "rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default", "rope_theta": 10000.0}},
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    }
    return base | fields


VARIANTS: dict[str, dict[str, Any]] = {
    "2": gemma2(),
    "2, one KV head, window of a block": gemma2(num_key_value_heads=1, sliding_window=16, num_hidden_layers=2),
    "2, no caps": gemma2(attn_logit_softcapping=None, final_logit_softcapping=None),
    "2, first layers full, untied": gemma2(layer_types=[FULL, FULL, SLIDING], tie_word_embeddings=False),
    "2, exact gelu, biases": gemma2(hidden_activation="gelu", attention_bias=True, rms_norm_eps=1e-2),
    "3": gemma3(),
    "3, final cap": gemma3(final_logit_softcapping=5.0, query_pre_attn_scalar=16),
    "3, all sliding": gemma3(num_hidden_layers=2, layer_types=[SLIDING] * 2),
    "3, all full": gemma3(num_hidden_layers=2, layer_types=[FULL] * 2, sliding_window=5),
    "3, pattern of six": gemma3(layer_types=None),
}


def add_gemma(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        return
    full = config.rope_parameters[FULL]
    writer.add_rope_freq_base(full["rope_theta"])
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def to_gguf(folder: Path, arch: str, **options: Any) -> Path:
    return write_gguf(folder, arch, norm_offset=1.0, extra=add_gemma, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(make_model: Any, check_family: Any, variant: str) -> None:
    check_family(make_model(**VARIANTS[variant]))


@pytest.mark.parametrize(
    ("variant", "wrong"),
    [
        ("2", {"sliding_window": 22}),
        ("2", {"sliding_window": 24}),
        ("2", {"attn_logit_softcapping": None}),
        ("2", {"final_logit_softcapping": None}),
        ("2", {"query_pre_attn_scalar": 16}),
        ("2", {"layer_types": [FULL, SLIDING, FULL]}),
        ("2", {"hidden_activation": "gelu"}),
        ("3", {"sliding_window": 22}),
        ("3", {"sliding_window": 24}),
        ("3", {"rope_parameters": {FULL: LINEAR | {"factor": 4.1}}}),
        ("3", {"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_theta": 10100.0}}}),
        ("3", {"layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL, SLIDING]}),
    ],
)
def test_control_a_slightly_wrong_config_fails(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, variant: str, wrong: dict[str, Any]
) -> None:
    folder = make_model(**VARIANTS[variant])
    tokens = random_tokens(100)
    expected = expected_logits(folder, tokens)
    got = paged_model(changed_config(folder, **wrong)).chunked(tokens, 100)
    assert (got - expected).abs().max() > 1e-3


def test_configs_of_their_first_days_mean_the_same(make_model: Any, check_family: Any) -> None:
    """No layer_types, and rope fields side by side; what has its default is left out."""
    second = make_model(**gemma2(num_hidden_layers=2))
    old = {"layer_types": ..., "rope_parameters": ..., "rope_theta": 10000.0, "hidden_act": "ignored"}
    check_family(changed_config(second, **old))
    third = make_model(**gemma3(layer_types=[SLIDING, FULL] * 3 + [SLIDING]))
    old = {"layer_types": ..., "_sliding_window_pattern": ..., "sliding_window_pattern": 2, "rope_parameters": ...}
    scaling = {"rope_type": "linear", "factor": 4.0}
    check_family(changed_config(third, **old, rope_theta=50000.0, rope_local_base_freq=10000.0, rope_scaling=scaling))


def test_the_text_model_is_taken_out_of_one_that_sees_images(
    tmp_path: Path, make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any
) -> None:
    folder = make_model(**gemma3())
    tokens = random_tokens(60)
    expected = expected_logits(folder, tokens)
    text = json.loads((folder / "config.json").read_text())
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 16, "num_attention_heads": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for prefix in ("language_model.model.", "model.language_model."):
        found = {prefix + name.removeprefix("model."): weight for name, weight in weights.items()}
        for other in ("vision_tower.vision_model.post_layernorm.bias", "multi_modal_projector.mm_soft_emb_norm.weight"):
            found[other] = torch.ones(3)
        save_file(found, tmp_path / "model.safetensors")
        got = paged_model(tmp_path).chunked(tokens, 17)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": True}, "causal models only"),
        ({"sliding_window": None}, "sliding_window must be a number of tokens"),
        ({"attn_logit_softcapping": 50.0}, "Gemma 3 has none"),
        ({"layer_types": ["chunked_attention"] * 7}, "'chunked_attention' is not supported"),
        ({"hidden_activation": "relu"}, "'relu' is not supported"),
        ({"rope_parameters": {FULL: LINEAR, SLIDING: LINEAR}}, "only rope_type default"),
    ],
)
def test_what_octavo_does_not_compute_is_refused_by_name(make_model: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        read_model_facts(changed_config(make_model(**gemma3()), **fields))


def test_in_bfloat16_embedding_and_norms_are_those_of_transformers(make_model: Any, paged_model: Any) -> None:
    folder = make_model(**gemma2(), dtype="bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).model
    ours = paged_model(folder, dtype="bfloat16").model.model
    with torch.inference_mode():
        ids = torch.arange(301)
        embedded = theirs.embed_tokens(ids)
        assert torch.equal(ours.embed_tokens(ids).bfloat16(), embedded)
        assert torch.equal(ours.norm(embedded), theirs.norm(embedded))
        # Controls: a factor that was not rounded, and a sum that was.
        assert not torch.equal((theirs.embed_tokens.weight.float() * math.sqrt(72)).bfloat16(), embedded)
        ours.norm.weight.data = ours.norm.weight.bfloat16()
        assert not torch.equal(ours.norm(embedded), theirs.norm(embedded))


@pytest.mark.parametrize("final", [None, 5.0])
def test_a_gguf_file_gives_the_logits_of_its_source(make_model: Any, check_family: Any, final: float | None) -> None:
    second = make_model(**gemma2(query_pre_attn_scalar=16))
    check_family(second, gguf=to_gguf(second, "gemma2"))
    third = make_model(**gemma3(layer_types=None, query_pre_attn_scalar=16, final_logit_softcapping=final))
    check_family(third, gguf=to_gguf(third, "gemma3"))


@pytest.mark.parametrize(("make", "arch", "layers"), [(gemma2, "gemma2", 46), (gemma3, "gemma3", 62)])
def test_the_27b_sizes_have_another_scale_that_gguf_does_not_tell(
    make_model: Any, make: Any, arch: str, layers: int
) -> None:
    small = {"hidden_size": 48, "intermediate_size": 16, "layer_types": None}
    folder = make_model(**make(**small, num_hidden_layers=layers))
    assert read_model_facts(to_gguf(folder, arch)).hf_config["query_pre_attn_scalar"] == 48 // 6
    folder = make_model(**make(**small, num_hidden_layers=layers - 1))
    assert read_model_facts(to_gguf(folder, arch)).hf_config["query_pre_attn_scalar"] == 16


def test_control_a_gguf_file_whose_norms_lack_the_one_fails(make_model: Any, check_family: Any) -> None:
    folder = make_model(**gemma2(query_pre_attn_scalar=16))
    with pytest.raises(AssertionError):
        check_family(folder, gguf=write_gguf(folder, "gemma2", extra=add_gemma))


@pytest.mark.parametrize("make", [gemma2, gemma3])
@pytest.mark.parametrize("from_gguf", [False, True])
def test_the_engine_continues_as_transformers(make_model: Any, make: Any, from_gguf: bool) -> None:
    kinds = {} if make is gemma2 else {"layer_types": None}
    folder = make_model(**make(query_pre_attn_scalar=16, vocab_size=VOCAB_SIZE, **kinds))
    path = to_gguf(folder, make.__name__) if from_gguf else None
    assert_engine_continues_as_transformers(folder, path)
