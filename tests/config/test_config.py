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
        ({"max_model_len": 1}, "--max-model-len must be between 2"),
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
        "observability": {},
    }
    line = "m --max-model-len 64 --no-enable-prefix-caching --scheduling-policy priority --gpu-memory-utilization 0.2"
    stated = EngineArgs.from_cli_args(parser.parse_args(line.split())).stated
    assert stated["model"]["max_model_len"] == 64
    assert stated["cache"] == {"enable_prefix_caching": False, "memory_share": 0.2}
    assert stated["scheduler"] == {"policy": "priority"}
