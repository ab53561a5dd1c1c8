"""From what was stated, what the model is and what the machine has, to the final configuration.

Each value gets a reason. What contradicts the model or another value is a ConfigError that names the flag.
"""

import dataclasses
import secrets
from typing import Any

from octavo.config.cache import CacheConfig
from octavo.config.compilation import CompilationConfig
from octavo.config.engine_args import EngineArgs
from octavo.config.load import LoadConfig
from octavo.config.model import CHECKPOINT_QUANTIZATIONS, QUANTIZED_WHILE_LOADING, ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.octavo_config import OctavoConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.sampling_defaults import sampling_defaults
from octavo.config.scheduler import SchedulerConfig
from octavo.errors import ConfigError, UsageError
from octavo.types import ModelFacts, PlatformFacts

__all__ = ["resolve_config"]


class _Choices:
    """Collects values and why they were chosen."""

    def __init__(self, stated: dict[str, dict[str, Any]]) -> None:
        self.stated = stated
        self.reasons: dict[str, str] = {}

    def group(self, name: str, config: type, chosen: dict[str, tuple[Any, str]]) -> dict[str, Any]:
        """Field values of one config: stated, else chosen here, else the field's default."""
        values: dict[str, Any] = {}
        for item in dataclasses.fields(config):
            if "help" not in item.metadata:
                continue
            if item.name in self.stated[name]:
                values[item.name], reason = self.stated[name][item.name], "stated"
            elif item.name in chosen:
                values[item.name], reason = chosen[item.name]
            else:
                made = item.default_factory is not dataclasses.MISSING
                values[item.name] = item.default_factory() if made else item.default  # type: ignore[operator]
                reason = "default"
            self.reasons[item.name] = reason
        return values


def resolve_config(
    args: EngineArgs, model: ModelFacts, platform: PlatformFacts, tokenizer_path: str | None = None
) -> OctavoConfig:
    """The final configuration.

    Args:
        model: read with the stated ``--hf-overrides``; its ``generation_config`` is what ``--generation-config`` says.
        tokenizer_path: of a stated ``--tokenizer``; None: the model's own.

    Raises:
        ConfigError: a stated value that this model or this machine cannot have.
    """
    choices = _Choices(args.stated)
    model_config = _model(choices, model, platform, tokenizer_path)
    load = LoadConfig(**choices.group("load", LoadConfig, {}))
    _check_format(model_config.quantization, load.load_format, model)
    scheduler = _scheduler(choices, model_config, platform)
    return OctavoConfig(
        model=model_config,
        cache=_cache(choices, model_config.dtype, platform),
        scheduler=scheduler,
        parallel=ParallelConfig(**choices.group("parallel", ParallelConfig, {})),
        observability=ObservabilityConfig(**choices.group("observability", ObservabilityConfig, {})),
        load=load,
        compilation=CompilationConfig(**choices.group("compilation", CompilationConfig, {})),
        reasons=choices.reasons,
    )


def _cache(choices: _Choices, dtype: str, platform: PlatformFacts) -> CacheConfig:
    default = f"default of the {platform.name} platform"
    values = choices.group(
        "cache",
        CacheConfig,
        {
            "block_size": (platform.default_block_size, default),
            "memory_share": (platform.default_memory_share, default),
        },
    )
    if values["kv_cache_dtype"] == "auto":
        values["kv_cache_dtype"], choices.reasons["kv_cache_dtype"] = dtype, "that of --dtype"
    elif values["kv_cache_dtype"] == "fp8_e4m3":
        values["kv_cache_dtype"] = "fp8"
    return CacheConfig(**values)


def _model(choices: _Choices, facts: ModelFacts, platform: PlatformFacts, tokenizer_path: str | None) -> ModelConfig:
    stated = choices.stated["model"]
    derived: dict[str, tuple[Any, str]] = {
        "max_model_len": (facts.max_position_embeddings, "the model's longest sequence"),
        "served_model_name": ([stated.get("model", facts.path)], "MODEL as given"),
        "seed": (secrets.randbits(63), "drawn at start-up"),
    }
    values = choices.group("model", ModelConfig, derived)
    values["dtype"], choices.reasons["dtype"] = _dtype(values["dtype"], facts, platform)
    if values["max_model_len"] > facts.max_position_embeddings:
        raise UsageError(
            f"--max-model-len {values['max_model_len']} is more than the {facts.max_position_embeddings} tokens that "
            f"the model was made for; lower it to at most {facts.max_position_embeddings}"
        )
    defaults, source = sampling_defaults(
        facts.generation_config, _generation_source(values["generation_config"]), values["override_generation_config"]
    )
    if source is not None:
        choices.reasons["default_sampling_params"] = source
    return ModelConfig(
        **values,
        path=facts.path,
        tokenizer_path=tokenizer_path or facts.path,
        architecture=facts.architecture,
        hf_config=facts.hf_config,
        vocab_size=facts.vocab_size,
        eos_token_ids=tuple(facts.eos_token_ids),
        fingerprint=_fingerprint(facts.fingerprint, values["quantization"]),
        max_model_len_stated="max_model_len" in stated,
        default_sampling_params=defaults,
    )


def _fingerprint(checkpoint: str, quantization: str) -> str:
    """Of the weights as they are used: what is quantized while it is loaded computes other numbers."""
    return f"{checkpoint}-{quantization}" if quantization in QUANTIZED_WHILE_LOADING else checkpoint


def _generation_source(stated: str) -> str:
    """What to call the file that sampling defaults come from."""
    return "generation_config.json" if stated in ("auto", "vllm") else f"{stated}/generation_config.json"


def _check_format(quantization: str, load_format: str, facts: ModelFacts) -> None:
    """What was stated of the weights must be so: a mistake in MODEL should show. Only what is not quantized is."""
    kinds = {"gguf": "a GGUF file", "none": "unquantized safetensors"}
    kind = kinds.get(facts.quantization, f"quantized by {facts.quantization}")
    if load_format not in ("auto", facts.format):
        raise ConfigError(
            f"--load-format {load_format}: {facts.path} is {kind}; leave the flag out, or say {facts.format}"
        )
    if quantization in QUANTIZED_WHILE_LOADING:
        if facts.quantized_as:
            raise ConfigError(
                f"--quantization {quantization}: {facts.path} is quantized already ({', '.join(facts.quantized_as)}), "
                "and would only lose by it; leave the flag out, or take the model as it was before"
            )
        return
    stated = CHECKPOINT_QUANTIZATIONS.get(quantization, quantization)
    if stated not in ("auto", facts.quantization):
        raise ConfigError(
            f"--quantization {quantization}: {facts.path} is {kind}; leave the flag out, or say {facts.quantization}"
        )


def _dtype(asked: str, facts: ModelFacts, platform: PlatformFacts) -> tuple[str, str]:
    """(data type, reason). A stated one that the platform does not compute in is refused, never replaced."""
    supported = platform.supported_dtypes
    if asked != "auto":
        if asked not in supported:
            raise ConfigError(
                f"--dtype {asked} is not computed on {platform.name}; use {' or '.join(supported)} "
                f"(or auto, which runs a {asked} checkpoint as {supported[0]})"
            )
        return asked, "stated"
    if facts.dtype in supported:
        return facts.dtype, "the checkpoint's"
    return supported[0], f"the checkpoint is {facts.dtype}, which {platform.name} runs as {supported[0]}"


def _scheduler(choices: _Choices, model: ModelConfig, platform: PlatformFacts) -> SchedulerConfig:
    stated = choices.stated["scheduler"]
    default = f"default of the {platform.name} platform"
    overlap = f"overlap {'pays' if platform.async_scheduling else 'would only steal cores'} on {platform.name}"
    num_seqs = stated.get("max_num_seqs", platform.default_max_num_seqs)
    num_tokens = max(platform.default_max_num_batched_tokens, num_seqs)
    if "max_num_batched_tokens" in stated and "max_num_seqs" not in stated:
        num_seqs = min(num_seqs, max(1, stated["max_num_batched_tokens"]))
    derived: dict[str, tuple[Any, str]] = {
        "max_num_batched_tokens": (num_tokens, default),
        "max_num_seqs": (num_seqs, default),
        "async_scheduling": (platform.async_scheduling, overlap),
    }
    config = SchedulerConfig(**choices.group("scheduler", SchedulerConfig, derived))
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise UsageError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is less than --max-num-seqs "
            f"{config.max_num_seqs}: each running request needs a token a step"
        )
    return config
