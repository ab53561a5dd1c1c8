"""config.json and its neighbours: what is read, what is refused, and that each refusal names file and field."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from octavo.checkpoints import read_model_facts
from octavo.errors import CheckpointError, ModelError, UnsupportedError

MakeFolder = Callable[..., Path]


def config_of(folder: Path) -> dict[str, Any]:
    return read_model_facts(folder).hf_config


def test_facts_of_a_folder(make_folder: MakeFolder, weights: dict[str, Any]) -> None:
    facts = read_model_facts(make_folder(generation_config={"temperature": 0.6}))
    assert facts.format == "safetensors"
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.vocab_size == 128
    assert facts.max_position_embeddings == 256
    assert facts.dtype == "float32"
    assert facts.weight_bytes == sum(weight.nbytes for weight in weights.values())
    assert facts.generation_config == {"temperature": 0.6}
    assert facts.eos_token_ids == [2]
    assert facts.hf_config["head_dim"] == 16
    assert facts.hf_config["hidden_act"] == "silu"
    assert facts.hf_config["attention_bias"] is False
    assert facts.hf_config["sliding_window"] is None


def test_facts_cross_processes(make_folder: MakeFolder) -> None:
    facts = read_model_facts(make_folder(generation_config={"x": [1, {"y": None}]}))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=type(facts)) == facts


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": ..., "dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"torch_dtype": ...}, "float32"),
        ({"torch_dtype": None}, "float32"),
    ],
)
def test_the_data_type_is_the_stated_one_or_that_of_the_weights(
    make_folder: MakeFolder, stated: dict[str, Any], expected: str
) -> None:
    assert read_model_facts(make_folder(**stated)).dtype == expected


def test_another_data_type_is_refused(make_folder: MakeFolder) -> None:
    with pytest.raises(
        UnsupportedError, match=r"config.json: dtype 'float8_e4m3fn' is not supported; supported: float32"
    ):
        read_model_facts(make_folder(torch_dtype="float8_e4m3fn"))


REQUIRED = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]


@pytest.mark.parametrize("field", [*REQUIRED, "max_position_embeddings", "num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [64], 2**40, 10**30])
def test_counts_of_the_wrong_kind_or_size_are_named(make_folder: MakeFolder, field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"config.json: ({field} must be|a whole number beyond 64 bits)"):
        read_model_facts(make_folder(**{field: value}))


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_count_is_named(make_folder: MakeFolder, field: str) -> None:
    for absent in (..., None):
        with pytest.raises(CheckpointError, match=rf"config.json: {field} is missing"):
            read_model_facts(make_folder(**{field: absent}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of num_attention_heads, which is 4, got 3"),
        ({"num_attention_heads": 6}, "num_attention_heads must be a divisor of hidden_size, which is 64"),
        ({"head_dim": 15}, "head_dim must be an even number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be a number from 0 to 1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
        ({"architectures": [7]}, "architectures must be a list of names"),
        ({"eos_token_id": 128}, "eos_token_id must be token ids from 0 to 127, got 128"),
        ({"eos_token_id": "2"}, "eos_token_id must be token ids"),
        ({"eos_token_id": [2, True]}, "eos_token_id must be token ids"),
        ({"rope_theta": 0}, "rope_theta must be a number"),
        ({"rope_theta": "1e4"}, "rope_theta must be a number"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
    ],
)
def test_fields_that_cannot_be_right_are_named(make_folder: MakeFolder, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        read_model_facts(make_folder(**config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' is not supported; supported: .*LlamaForCausalLM, Mi",
        ),
        (
            {"architectures": ..., "model_type": "gpt2"},
            "model_type 'gpt2' is not supported; supported: .*LlamaForCausalLM",
        ),
        ({"architectures": ["MyModel"], "auto_map": {"AutoModel": "m.py"}}, "does not run code from checkpoints"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: octavo rotates whole heads"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of different kinds"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types: 'sliding_attention' is not supported"),
    ],
)
def test_what_octavo_does_not_have_is_refused_by_name(
    make_folder: MakeFolder, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_model_facts(make_folder(**config))


@pytest.mark.parametrize("method", ["bitsandbytes", "aqlm"])
def test_quantized_checkpoints_are_refused_by_name_with_what_is_supported(make_folder: MakeFolder, method: str) -> None:
    message = rf"quantization_config\.quant_method: '{method}' is not supported; supported: awq, .*gptq, and GGUF files"
    with pytest.raises(UnsupportedError, match=message):
        read_model_facts(make_folder(quantization_config={"quant_method": method, "bits": 4}))


def test_the_architecture_follows_from_the_model_type(make_folder: MakeFolder) -> None:
    facts = read_model_facts(make_folder(architectures=..., model_type="mistral"))
    assert facts.architecture == "MistralForCausalLM"


def test_a_known_architecture_may_carry_code_that_is_not_run(make_folder: MakeFolder) -> None:
    folder = make_folder(auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    (folder / "modeling.py").write_text("raise SystemExit('code of a checkpoint was run')")
    assert read_model_facts(folder).architecture == "LlamaForCausalLM"


def test_chunked_attention_that_is_not_followed_is_said(
    make_folder: MakeFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    read_model_facts(make_folder(**qwen))
    assert "dual_chunk_attention_config" not in caplog.text
    read_model_facts(make_folder(**qwen, dual_chunk_attention_config={"chunk_size": 262144}))
    assert "dual_chunk_attention_config is not followed" in caplog.text


def test_a_mistral_has_the_defaults_of_its_class(make_folder: MakeFolder) -> None:
    settings = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_attention_heads": 8}
    reference = transformers.MistralConfig()
    found = config_of(make_folder(**settings, num_key_value_heads=..., max_position_embeddings=...))
    assert found["num_key_value_heads"] == reference.num_key_value_heads
    assert found["max_position_embeddings"] == reference.max_position_embeddings
    assert found["sliding_window"] == reference.sliding_window
    assert config_of(make_folder(**settings, sliding_window=None))["sliding_window"] is None
    assert config_of(make_folder(**settings, sliding_window=17))["sliding_window"] == 17


def test_a_llama_has_no_sliding_window(make_folder: MakeFolder) -> None:
    assert config_of(make_folder(sliding_window=17))["sliding_window"] is None


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_type": "llama3", **LLAMA3}, {"rope_type": "llama3", **LLAMA3}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **YARN_DEFAULTS},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "mscale": 1, "mscale_all_dim": 0.5, "beta_fast": None},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                **YARN_DEFAULTS,
            },
        ),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 64, "attention_factor": 1.5, "truncate": False},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.5,
                **YARN_DEFAULTS,
                "truncate": False,
            },
        ),
    ],
)
def test_rope_settings_are_the_same_in_the_old_and_the_new_spelling(
    make_folder: MakeFolder, scaling: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    oldest = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    for settings in (
        {"rope_theta": 5e5, "rope_scaling": scaling},
        {"rope_theta": 5e5, "rope_scaling": oldest},
        {"rope_theta": ..., "rope_parameters": scaling | {"rope_theta": 5e5}},
    ):
        found = config_of(make_folder(**settings))
        assert found["rope_theta"] == 5e5
        assert found["rope_scaling"] == expected
        assert "rope_parameters" not in found


def test_no_rope_settings_are_the_class_defaults(make_folder: MakeFolder) -> None:
    found = config_of(make_folder(rope_theta=..., rope_scaling=None))
    assert (found["rope_theta"], found["rope_scaling"]) == (10000.0, None)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_dynamic_rope_is_refused_with_the_reason(make_folder: MakeFolder, spelling: str) -> None:
    supported = "default, linear, llama3, longrope, yarn"
    message = rf"{spelling}.rope_type 'dynamic' .*cached keys would be wrong; supported: {supported}"
    with pytest.raises(UnsupportedError, match=message):
        read_model_facts(make_folder(**{spelling: {"rope_type": "dynamic", "factor": 2.0}}))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "ntk"}, "rope_type 'ntk' is not supported"),
        ({"rope_type": "longrope"}, "rope_scaling.short_factor must be a list of numbers"),
        ({"rope_type": "longrope", "short_factor": [1.0, 0.0]}, "rope_scaling.short_factor must be a list of numbers"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [True]}, "rope_scaling.long_factor must be"),
        ({"rope_type": 4}, "rope_scaling.rope_type must be a string"),
        ({"rope_type": "linear"}, "rope_scaling.factor is missing"),
        ({"rope_type": "linear", "factor": 0}, "rope_scaling.factor must be a number"),
        ({"rope_type": "linear", "factor": True}, "rope_scaling.factor must be a number"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}, "rope_scaling.high_freq_factor must be above"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": None}, "rope_scaling.low_freq_factor is missing"),
        ({"rope_type": "yarn", "factor": 2, "truncate": 1}, "rope_scaling.truncate must be true or false"),
        (
            {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0},
            "rope_scaling.original_max_position_embeddings must be a whole number",
        ),
    ],
)
def test_wrong_rope_settings_are_named(make_folder: MakeFolder, scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model_facts(make_folder(rope_scaling=scaling))


def test_end_of_sequence_ids_come_from_all_files_without_repeats(make_folder: MakeFolder) -> None:
    folder = make_folder(eos_token_id=[2, 3], generation_config={"eos_token_id": [3, 5]})
    assert read_model_facts(folder).eos_token_ids == [2, 3, 5]
    added = [{"id": 2, "content": "</s>"}, {"id": 9, "content": "<|im_end|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"a": 7}}}))
    for token in ("<|im_end|>", {"content": "<|im_end|>", "lstrip": False}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token, "model_max_length": 10**30}))
        assert read_model_facts(folder).eos_token_ids == [2, 3, 5, 9]
    assert read_model_facts(make_folder(eos_token_id=None, generation_config={})).eos_token_ids == [9]


def test_a_wrong_id_in_generation_config_names_that_file(make_folder: MakeFolder) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id must be token ids"):
        read_model_facts(make_folder(generation_config={"eos_token_id": -1}))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"a": 123456789012345678901234567890}',
        b"[" * 100_000,
        b'{"a":' * 40 + b"1" + b"}" * 40,
    ],
)
def test_malformed_json_names_the_file(make_folder: MakeFolder, file: str, raw: bytes) -> None:
    folder = make_folder(shards=2)
    (folder / file).write_bytes(raw)
    with pytest.raises(CheckpointError, match=file) as caught:
        read_model_facts(folder)
    assert len(str(caught.value)) < 500


def test_an_oversized_json_file_is_not_read(make_folder: MakeFolder) -> None:
    folder = make_folder()
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match="larger than the"):
        read_model_facts(folder)


@pytest.mark.parametrize("rope", [{}, {"rope_type": "llama3", **LLAMA3}, {"rope_type": "yarn", "factor": 4.0}])
def test_what_transformers_writes_is_read(tmp_path: Path, weights: dict[str, Any], rope: dict[str, Any]) -> None:
    import safetensors.numpy

    parameters = {"rope_type": "default", "rope_theta": 12345.0} | rope
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, num_attention_heads=4, rope_parameters=parameters, eos_token_id=[1, 2]
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    facts = read_model_facts(tmp_path)
    assert facts.hf_config["rope_theta"] == 12345.0
    assert (facts.hf_config["rope_scaling"] or {}).get("rope_type") == rope.get("rope_type")
    assert facts.hf_config["num_key_value_heads"] == config.num_key_value_heads
    assert facts.hf_config["head_dim"] == config.head_dim
    assert facts.eos_token_ids == [1, 2]
