"""GGUF files of the llama architecture: names, row order and config as Hugging Face has them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.checkpoints import CheckpointTensor, iterate_tensors, read_model_facts
from octavo.errors import CheckpointError, ModelError, UnsupportedError

MakeGguf = Callable[..., Path]


def tensors_of(path: Path) -> dict[str, CheckpointTensor]:
    return {tensor.name: tensor for tensor in iterate_tensors(path)}


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_tensors_come_under_their_hugging_face_names_with_rows_in_its_order(
    make_gguf: MakeGguf, weights: dict[str, Any], quantization: str
) -> None:
    """Quantizing works within a row, so that quantizing and reordering rows may be swapped: the expected values never
    go through octavo's reordering."""
    kind = gguf.GGMLQuantizationType[quantization]
    found = tensors_of(make_gguf(quantization))
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        if weight.ndim == 1:
            expected = weight
            assert found[name].type == "F32"
        else:
            expected = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
            assert found[name].type == quantization
        np.testing.assert_array_equal(found[name].to_float32(), expected)
        assert found[name].shape == weight.shape
        assert not found[name].data.flags.writeable


def test_control_the_file_itself_has_the_rows_of_q_and_k_in_another_order(
    make_gguf: MakeGguf, weights: dict[str, Any]
) -> None:
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(make_gguf()).tensors}
    for part, name in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
        weight = weights[f"model.layers.0.self_attn.{part}.weight"]
        assert not np.array_equal(stored[f"blk.0.{name}.weight"], weight)
        np.testing.assert_array_equal(np.sort(stored[f"blk.0.{name}.weight"], axis=None), np.sort(weight, axis=None))


def test_biases_of_q_and_k_are_reordered_too(make_gguf: MakeGguf) -> None:
    bias = np.arange(64, dtype=np.float32)
    stored = bias.reshape(4, 2, 8).transpose(0, 2, 1).reshape(-1)
    path = make_gguf(extra={"blk.0.attn_q.bias": np.ascontiguousarray(stored)})
    np.testing.assert_array_equal(tensors_of(path)["model.layers.0.self_attn.q_proj.bias"].to_float32(), bias)
    assert read_model_facts(path).hf_config["attention_bias"] is True


def test_the_config_has_hugging_face_fields(make_gguf: MakeGguf) -> None:
    facts = read_model_facts(make_gguf("Q8_0"))
    assert facts.format == "gguf"
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.vocab_size == 128
    assert facts.max_position_embeddings == 256
    assert facts.eos_token_ids == [2]
    assert facts.generation_config == {}
    assert facts.hf_config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": pytest.approx(1e-5),
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_a_file_with_an_output_matrix_is_untied(make_gguf: MakeGguf) -> None:
    path = make_gguf(tied=False)
    assert read_model_facts(path).hf_config["tie_word_embeddings"] is False
    assert "lm_head.weight" in tensors_of(path)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16"), ("Q4_1", "bfloat16")],
)
def test_quantized_files_count_as_bfloat16(make_gguf: MakeGguf, quantization: str, dtype: str) -> None:
    assert read_model_facts(make_gguf(quantization)).dtype == dtype


def test_every_end_of_sequence_id_is_found_once(make_gguf: MakeGguf) -> None:
    facts = read_model_facts(make_gguf(tokenizer__ggml__eot_token_id=5, tokenizer__ggml__eom_token_id=2))
    assert facts.eos_token_ids == [2, 5]
    assert facts.hf_config["eos_token_id"] == [2, 5]


def test_a_sliding_window_makes_it_a_mistral(make_gguf: MakeGguf) -> None:
    facts = read_model_facts(make_gguf(llama__attention__sliding_window=32))
    assert facts.architecture == "MistralForCausalLM"
    assert facts.hf_config["sliding_window"] == 32


def test_a_head_length_of_its_own_is_read(make_gguf: MakeGguf, weights: dict[str, Any]) -> None:
    narrow = {name: weight for name, weight in weights.items() if "embed" in name}
    path = make_gguf(weights=narrow, llama__attention__key_length=32, llama__attention__value_length=32)
    assert read_model_facts(path).hf_config["head_dim"] == 32


def test_numbers_stated_for_each_layer_may_be_the_same(make_gguf: MakeGguf) -> None:
    assert read_model_facts(make_gguf(llama__attention__head_count_kv=[2, 2])).hf_config["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedError, match=r"llama.attention.head_count_kv: different values in different layers"):
        read_model_facts(make_gguf(llama__attention__head_count_kv=[2, 4]))


def scaling(make_gguf: MakeGguf, **metadata: Any) -> dict[str, Any] | None:
    settings = {f"llama__rope__scaling__{key}": value for key, value in metadata.items()}
    found: dict[str, Any] | None = read_model_facts(make_gguf(**settings)).hf_config["rope_scaling"]
    return found


def test_rope_scalings_come_in_hugging_face_form(make_gguf: MakeGguf) -> None:
    assert scaling(make_gguf, type="none") is None
    assert scaling(make_gguf, type="linear", factor=1.0) is None
    assert scaling(make_gguf, type="linear", factor=4.0) == {"rope_type": "linear", "factor": 4.0}
    assert scaling(make_gguf, type="yarn", factor=4.0, original_context_length=64) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
    }
    stated = scaling(
        make_gguf,
        type="yarn",
        factor=4.0,
        original_context_length=64,
        yarn_beta_fast=16.0,
        yarn_beta_slow=2.0,
        attn_factor=0.5,
    )
    assert stated is not None
    assert (stated["beta_fast"], stated["beta_slow"]) == (16.0, 2.0)
    assert stated["attention_factor"] == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1.0))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"type": "longrope", "factor": 2.0}, "longrope.*supported: none, linear, yarn"),
        ({"type": "yarn", "factor": 2.0}, "llama.rope.scaling.original_context_length is missing"),
        ({"type": "yarn", "original_context_length": 64}, "llama.rope.scaling.factor must be a number above 0"),
        ({"type": 3}, "llama.rope.scaling.type must be a string"),
        ({"type": "yarn", "factor": 2.0, "original_context_length": 64, "yarn_ext_factor": 0.5}, "yarn_ext_factor"),
    ],
)
def test_other_rope_scalings_are_refused(make_gguf: MakeGguf, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        scaling(make_gguf, **metadata)


def test_rope_factors_are_part_of_the_config_and_not_a_tensor(make_gguf: MakeGguf) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = make_gguf(extra={"rope_freqs.weight": factors})
    assert read_model_facts(path).hf_config["rope_freq_factors"] == factors.tolist()
    assert not [name for name in tensors_of(path) if "rope" in name]


@pytest.mark.parametrize(
    "factors", [np.ones(7, np.float32), np.ones(8, np.float16), np.zeros(8, np.float32), np.full(8, np.nan, np.float32)]
)
def test_wrong_rope_factors_name_the_tensor(make_gguf: MakeGguf, factors: np.ndarray[Any, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model_facts(make_gguf(extra={"rope_freqs.weight": factors}))
    assert caught.value.tensor == "rope_freqs.weight"


COUNTS = [
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
]
EPSILON = "llama.attention.layer_norm_rms_epsilon"


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in COUNTS for value in (None, "seven", 0, -1, 2**40, True, 2.0, ["x"])]
    + [(EPSILON, value) for value in (None, "small", -1.0, float("nan"), float("inf"), True, 10**12)],
)
def test_missing_and_wrong_metadata_are_named(make_gguf: MakeGguf, key: str, value: Any) -> None:
    path = make_gguf(**{key.replace(".", "__"): value})
    with pytest.raises(CheckpointError, match=rf"{key} (is missing|must be)"):
        read_model_facts(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama__attention__head_count_kv": 3}, "num_key_value_heads must be a divisor"),
        ({"llama__embedding_length": 2**25}, "hidden_size must be a whole number"),
        ({"llama__block_count": 1}, "tensor 'blk.1.[a-z_.]*': layer 1 of a model of 1"),
        ({"llama__attention__head_count": 8}, "'blk.0.attn_k.weight': 32 rows, 2 heads of 8 are expected"),
        ({"llama__attention__key_length": 32}, "'blk.0.attn_q.weight': 64 rows, 4 heads of 32 are expected"),
        ({"llama__attention__key_length": 3}, "head_dim must be an even number"),
        ({"tokenizer__ggml__tokens": ["x"] * 129}, "128 rows, fewer than the 129 entries of tokenizer.ggml.tokens"),
        ({"tokenizer__ggml__eos_token_id": 128}, "tokenizer.ggml.eos_token_id must be token ids from 0 to 127"),
        ({"tokenizer__ggml__bos_token_id": "one"}, "tokenizer.ggml.bos_token_id must be token ids"),
    ],
)
def test_metadata_that_contradict_each_other_or_the_tensors_are_refused(
    make_gguf: MakeGguf, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model_facts(make_gguf(**metadata))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "mamba"}, "GGUF architecture 'mamba' is not supported yet; supported: .*llama"),
        ({"split__count": 3}, "one part of a split GGUF; merge the parts"),
        ({"llama__expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale = 0.5 is not supported"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count 8 is not the head's length 16"),
        ({"llama__attention__value_length": 8}, "llama.attention.value_length 8 is not the head's length 16"),
        ({"extra": {"blk.0.ffn_gate_inp.weight": np.ones((4, 4), np.float32)}}, "'blk.0.ffn_gate_inp.weight' belongs"),
        ({"extra": {"blk.00.ffn_up.weight": np.ones((4, 4), np.float32)}}, "'blk.00.ffn_up.weight' belongs to no"),
    ],
)
def test_variants_that_octavo_does_not_have_are_refused_by_name(
    make_gguf: MakeGguf, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_model_facts(make_gguf(**options))


def test_values_that_change_nothing_are_not_refused(make_gguf: MakeGguf) -> None:
    harmless = {"llama__expert_count": 0, "llama__rope__dimension_count": 16, "split__count": 1}
    assert read_model_facts(make_gguf(**harmless)).architecture == "LlamaForCausalLM"
