"""Stated options become the final configuration, each value with its reason; contradictions are named."""

import argparse
import dataclasses
from typing import Any

import msgspec
import pytest

from octavo.config import EngineArgs, OctavoConfig, resolve_config
from octavo.errors import ConfigError
from octavo.types import ModelFacts, PlatformFacts

FACTS = ModelFacts(
    path="/models/m",
    format="safetensors",
    architecture="LlamaForCausalLM",
    hf_config={},
    vocab_size=100,
    max_position_embeddings=4096,
    dtype="bfloat16",
    weight_bytes=1000,
    generation_config={},
    eos_token_ids=[2],
    fingerprint="00",
)
PLATFORM = PlatformFacts(
    name="cpu",
    num_threads=2,
    supported_dtypes=["bfloat16", "float32"],
    default_memory_share=0.4,
    default_max_num_batched_tokens=2048,
    offline_max_num_batched_tokens=2048,
    default_max_num_seqs=128,
    default_block_size=16,
    async_scheduling=False,
)


def resolve(facts: ModelFacts = FACTS, **stated: Any) -> OctavoConfig:
    return resolve_config(EngineArgs(model="m", **stated), facts, PLATFORM)


def test_unstated_values_come_from_model_and_platform_with_a_reason() -> None:
    config = resolve()
    assert config.model.max_model_len == 4096
    assert config.reasons["max_model_len"] == "the model's longest sequence"
    assert not config.model.max_model_len_stated
    assert config.model.served_model_name == ["m"]
    assert config.cache.block_size == 16
    assert "cpu" in config.reasons["block_size"]
    assert config.scheduler.async_scheduling is False
    assert config.model.dtype == "bfloat16"


def test_every_flag_field_has_a_value_and_a_reason() -> None:
    config = resolve()
    for group in (config.model, config.cache, config.scheduler, config.parallel, config.observability, config.load):
        for item in dataclasses.fields(group):
            if "help" in item.metadata:
                assert item.name in config.reasons


def test_stated_values_are_kept_and_said_to_be_stated() -> None:
    config = resolve(max_model_len=128, max_num_seqs=3, gpu_memory_utilization=1, served_model_name=["a", "b"], seed=7)
    assert (config.model.max_model_len, config.scheduler.max_num_seqs, config.cache.memory_share) == (128, 3, 1.0)
    assert config.model.served_model_name == ["a", "b"]
    assert config.reasons["max_model_len"] == config.reasons["seed"] == "stated"
    assert config.model.max_model_len_stated


def test_the_final_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve().model.seed = 1  # type: ignore[misc]


def test_a_float16_checkpoint_runs_as_what_the_platform_computes_and_the_reason_says_so() -> None:
    config = resolve(msgspec.structs.replace(FACTS, dtype="float16"))
    assert config.model.dtype == "bfloat16"
    assert "float16" in config.reasons["dtype"]
    assert "bfloat16" in config.reasons["dtype"]


def test_a_stated_dtype_that_is_not_computed_here_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--dtype float16 .* bfloat16 or float32"):
        resolve(dtype="float16")


@pytest.mark.parametrize(
    ("stated", "names"),
    [
        ({"max_model_len": 0}, "--max-model-len"),
        ({"max_model_len": 1}, "--max-model-len must be a whole number between 2"),
        ({"max_model_len": 5000}, "--max-model-len 5000 .* 4096"),
        ({"max_model_len": "12"}, "--max-model-len must be a whole number"),
        ({"max_model_len": True}, "--max-model-len must be a whole number"),
        ({"block_size": 0}, "--block-size"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "--max-num-batched-tokens 32 .* --max-num-seqs 64"),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy must be one of fcfs, priority"),
        ({"dtype": "int3"}, "--dtype must be one of"),
        ({"max_modle_len": 5}, "did you mean 'max_model_len'"),
        ({"served_model_name": []}, "--served-model-name must be a name or a list of names"),
    ],
)
def test_a_wrong_option_is_named(stated: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        resolve(**stated)


def test_a_small_stated_token_budget_lowers_the_unstated_number_of_requests() -> None:
    assert resolve(max_num_batched_tokens=16).scheduler.max_num_seqs == 16


@pytest.mark.parametrize(
    ("stated", "resolved"),
    [({}, "bfloat16"), ({"dtype": "float32", "kv_cache_dtype": "auto"}, "float32")]
    + [({"kv_cache_dtype": stated}, kept) for stated, kept in (("int8", "int8"), ("fp8", "fp8"), ("fp8_e4m3", "fp8"))],
)
def test_the_kv_cache_keeps_what_was_stated_or_the_models_type(stated: dict[str, Any], resolved: str) -> None:
    config = resolve(**stated)
    assert config.cache.kv_cache_dtype == resolved
    expected = "that of --dtype" if stated.get("kv_cache_dtype", "auto") == "auto" else "stated"
    assert config.reasons["kv_cache_dtype"] == expected


def test_the_command_line_has_a_flag_for_every_option_and_states_only_what_was_given() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    EngineArgs.add_cli_args(parser)
    nothing = EngineArgs.from_cli_args(parser.parse_args(["m"]))
    assert nothing.stated == {
        "model": {"model": "m"},
        "load": {},
        "cache": {},
        "scheduler": {},
        "parallel": {},
        "compilation": {},
        "observability": {},
    }
    line = "m --max-model-len 64 --no-enable-prefix-caching --scheduling-policy priority --gpu-memory-utilization 0.2"
    line += " --quantization int4"
    stated = EngineArgs.from_cli_args(parser.parse_args(line.split())).stated
    assert stated["model"]["quantization"] == "int4"
    assert stated["model"]["max_model_len"] == 64
    assert stated["cache"] == {"enable_prefix_caching": False, "memory_share": 0.2}
    assert stated["scheduler"] == {"policy": "priority"}


def facts_of(kind: str) -> ModelFacts:
    """Of a checkpoint that is unquantized ("safetensors"), a GGUF file, or quantized otherwise."""
    fmt = "gguf" if kind == "gguf" else "safetensors"
    quantization, quantized_as = kind, [{"gguf": "Q4_K"}.get(kind, kind)]
    if kind == "safetensors":
        quantization, quantized_as = "none", []
    return msgspec.structs.replace(FACTS, format=fmt, quantization=quantization, quantized_as=quantized_as)


@pytest.mark.parametrize(
    ("fmt", "stated"),
    [
        ("safetensors", {}),
        ("safetensors", {"quantization": "none", "load_format": "safetensors"}),
        ("gguf", {"quantization": "gguf", "load_format": "gguf"}),
        ("gguf", {"quantization": "auto", "load_format": "auto"}),
        ("awq", {"quantization": "awq", "load_format": "safetensors"}),
        ("awq", {"quantization": "awq_marlin"}),
        ("gptq", {"quantization": "gptq_marlin"}),
        ("gptq", {}),
        ("safetensors", {"quantization": "int8", "load_format": "safetensors"}),
        ("safetensors", {"quantization": "int4"}),
    ],
)
def test_what_is_said_of_the_weights_is_taken_where_it_is_so(fmt: str, stated: dict[str, Any]) -> None:
    config = resolve(facts_of(fmt), **stated)
    assert config.load.load_format == stated.get("load_format", "auto")


@pytest.mark.parametrize(
    ("fmt", "stated", "says"),
    [
        ("gguf", {"quantization": "none"}, "--quantization none: /models/m is a GGUF file; .* say gguf"),
        ("safetensors", {"quantization": "gguf"}, "--quantization gguf: /models/m is unquantized safetensors; .* none"),
        ("gguf", {"load_format": "safetensors"}, "--load-format safetensors: /models/m is a GGUF file; .* say gguf"),
        ("safetensors", {"load_format": "gguf"}, "--load-format gguf: .* say safetensors"),
        ("awq", {"quantization": "gptq"}, "--quantization gptq: /models/m is quantized by awq; .* say awq"),
        ("awq", {"quantization": "none"}, "--quantization none: /models/m is quantized by awq; .* say awq"),
        ("safetensors", {"quantization": "awq_marlin"}, "awq_marlin: /models/m is unquantized .* say none"),
        ("gguf", {"quantization": "gptq"}, "--quantization gptq: /models/m is a GGUF file; .* say gguf"),
        ("gguf", {"quantization": "int4"}, r"int4: /models/m is quantized already \(Q4_K\), .*; leave the flag out"),
        ("awq", {"quantization": "int8"}, r"--quantization int8: /models/m is quantized already \(awq\), .*; leave"),
    ],
)
def test_what_is_said_of_the_weights_must_be_so(fmt: str, stated: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(facts_of(fmt), **stated)


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"quantization": "hqq"}, "--quantization hqq: not there yet: .* GGUF.* while loading: int8 or int4"),
        ({"quantization": "experts_int8"}, "--quantization experts_int8: not there yet"),
        ({"quantization": "int8_per_channel"}, "--quantization int8_per_channel: not there yet"),
        ({"quantization": "aqw"}, "--quantization must be one of auto, none, gguf, int8, int4, awq, .*; got 'aqw'"),
        ({"load_format": "dummy"}, "--load-format dummy: .* give a checkpoint"),
        ({"load_format": "pt"}, "--load-format pt: loading a pickle runs code"),
        ({"dtype": "half"}, "--dtype half: say float16"),
        ({"hf_overrides": "rope"}, "--hf-overrides must be a JSON object, got 'rope'"),
        ({"revision": ""}, "--revision must be text, got ''"),
        ({"max_logprobs": -2}, "--max-logprobs must be a whole number between -1"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2: say fp8: .* e4m3"),
        ({"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16: say auto"),
        ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype must be one of auto, int8, fp8, fp8_e4m3; got 'int4'"),
    ],
)
def test_values_known_from_elsewhere_are_refused_by_name(stated: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(**stated)


RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 2048, "do_sample": False, "bos": 1}


def test_the_models_sampling_defaults_are_taken_and_their_source_is_the_reason() -> None:
    config = resolve(msgspec.structs.replace(FACTS, generation_config=RECOMMENDED))
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 2048}
    assert config.model.default_sampling_params == expected
    assert config.reasons["default_sampling_params"] == "generation_config.json"


def test_a_model_that_recommends_nothing_has_no_sampling_defaults() -> None:
    config = resolve(msgspec.structs.replace(FACTS, generation_config={"do_sample": True, "temperature": None}))
    assert config.model.default_sampling_params == {}
    assert "default_sampling_params" not in config.reasons


def test_stated_sampling_defaults_go_before_the_models_and_null_takes_one_away() -> None:
    override = {"temperature": 0.1, "top_k": None, "min_p": 0.05}
    config = resolve(msgspec.structs.replace(FACTS, generation_config=RECOMMENDED), override_generation_config=override)
    expected = {"temperature": 0.1, "top_p": 0.95, "min_p": 0.05, "max_tokens": 2048}
    assert config.model.default_sampling_params == expected
    reason = config.reasons["default_sampling_params"]
    assert reason == "generation_config.json and --override-generation-config"


def test_a_recommendation_out_of_range_does_no_harm_once_it_is_overridden() -> None:
    facts = msgspec.structs.replace(FACTS, generation_config={"temperature": 7.0})
    with pytest.raises(ConfigError, match=r"generation_config.json: temperature must be between 0 and 2, got 7"):
        resolve(facts)
    assert resolve(facts, override_generation_config={"temperature": None}).model.default_sampling_params == {}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ({"temprature": 1}, "--override-generation-config: 'temprature' is no sampling default; known: temperature"),
        ({"eos_token_id": 1}, "'eos_token_id' is no sampling default"),
        ({"top_p": 0}, "--override-generation-config: top_p must be above 0"),
        ({"max_new_tokens": 0}, "--override-generation-config: max_new_tokens must be between 1"),
        ({"temperature": "hot"}, "--override-generation-config: temperature must be a number"),
        ({"top_k": True}, "--override-generation-config: top_k must be an integer"),
    ],
)
def test_an_override_that_no_request_could_have_is_refused(override: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(override_generation_config=override)


def test_overrides_and_short_names_on_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    EngineArgs.add_cli_args(parser)
    words = ["m", "-q", "gguf", "--hf-overrides", '{"rope_theta": 1e6}', "--logits-processors", "a:B", "c:D"]
    stated = EngineArgs.from_cli_args(parser.parse_args(words)).stated["model"]
    expected = {"model": "m", "quantization": "gguf", "hf_overrides": {"rope_theta": 1e6}}
    assert stated == expected | {"logits_processors": ["a:B", "c:D"]}


def test_an_empty_list_is_taken_where_nothing_is_a_value() -> None:
    assert resolve(logits_processors=[]).model.logits_processors == resolve().model.logits_processors == []
    with pytest.raises(ConfigError, match="--logits-processors must be a name or a list of names, got"):
        resolve(logits_processors=[int])


def test_the_tokenizer_is_the_models_own_where_none_is_stated() -> None:
    assert resolve().model.tokenizer_path == "/models/m"
    config = resolve_config(EngineArgs(model="m", tokenizer="t"), FACTS, PLATFORM, tokenizer_path="/tokenizers/t")
    assert (config.model.path, config.model.tokenizer_path) == ("/models/m", "/tokenizers/t")
