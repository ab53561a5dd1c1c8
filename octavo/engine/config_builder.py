"""From stated options to the final configuration: finds the model, reads what it is, asks the machine what it has."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from octavo.checkpoints import (
    DEFAULT_MODEL,
    FetchOptions,
    read_generation_config,
    read_model_facts,
    resolve_model,
    resolve_tokenizer,
)
from octavo.config import SAMPLING_DEFAULTS, EngineArgs, OctavoConfig, resolve_config
from octavo.engine.sampling_defaults import log_sampling_defaults
from octavo.errors import ConfigError, UsageError
from octavo.logging import init_logger
from octavo.platforms import current_platform
from octavo.types import ModelFacts

__all__ = ["build_config"]

logger = init_logger(__name__)

Progress = Callable[[str, float], None]

# Of generation_config.json: names that are no sampling defaults and have nothing to do with what is generated.
_NOT_ABOUT_SAMPLING = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "do_sample", "use_cache"}


def build_config(args: EngineArgs, progress: Progress | None = None, *, offline: bool = False) -> OctavoConfig:
    """The final configuration, logged with the reason for every value that was chosen for this model and machine.

    Args:
        args: what was stated; without a model it is the demo model.
        progress: told of a download's stages.
        offline: whether all answers are waited for, and none is streamed: steps are larger.

    Raises:
        ModelError: MODEL is nothing that octavo can find or read.
        ConfigError: a stated value that this model or machine cannot have; UsageError where it is a number.
    """
    _check_memory(args)
    model_stated = "model" in args.stated["model"]
    if not model_stated:
        args = copy.deepcopy(args)
        args.stated["model"]["model"] = DEFAULT_MODEL
    stated = args.stated["model"]
    download_dir = args.stated["load"].get("download_dir")
    path = resolve_model(stated["model"], progress, FetchOptions(stated.get("revision"), download_dir))
    tokenizer_path = _tokenizer_path(stated, download_dir, progress)
    facts = _with_sampling_defaults(
        read_model_facts(path, stated.get("hf_overrides")), stated.get("generation_config", "auto")
    )
    platform = current_platform().facts()
    if offline:
        num_tokens = platform.offline_max_num_batched_tokens
        platform = msgspec.structs.replace(platform, default_max_num_batched_tokens=num_tokens)
    config = resolve_config(args, facts, platform, tokenizer_path)
    if not model_stated:
        config = dataclasses.replace(config, reasons=config.reasons | {"model": "the demo model, as none was stated"})
    _log_choices(config, facts)
    for flag, why in args.without_effect.items():
        logger.info("%s changes nothing: %s", flag, why)
    return config


def _check_memory(args: EngineArgs) -> None:
    stated, total = args.stated["cache"].get("kv_cache_memory_bytes", 0), current_platform().total_memory_bytes()
    if stated > total:
        raise UsageError(
            f"--kv-cache-memory-bytes {stated} is more than the {total} bytes of memory that there are; lower it, or "
            "leave it out: then the KV cache takes a share of what is free"
        )


def _tokenizer_path(stated: dict[str, Any], download_dir: str | None, progress: Progress | None) -> str | None:
    revision = stated.get("tokenizer_revision")
    if "tokenizer" in stated:
        return str(resolve_tokenizer(stated["tokenizer"], progress, FetchOptions(revision, download_dir)))
    if revision is not None:
        raise ConfigError(
            f"--tokenizer-revision {revision}: there is no --tokenizer; MODEL's own comes with MODEL: use --revision"
        )
    return None


def _with_sampling_defaults(facts: ModelFacts, stated: str) -> ModelFacts:
    """The facts with the generation_config that ``--generation-config`` wants."""
    if stated == "auto":
        return facts
    if stated == "vllm":
        return msgspec.structs.replace(facts, generation_config={})
    if not (Path(stated) / "generation_config.json").is_file():
        raise ConfigError(
            f"--generation-config {stated}: auto, vllm or a folder with a generation_config.json is expected"
        )
    return msgspec.structs.replace(facts, generation_config=read_generation_config(Path(stated)))


def _log_choices(config: OctavoConfig, facts: ModelFacts) -> None:
    megabytes = facts.weight_bytes / 1e6
    logger.info("model: %s, %s of %.0f MB, from %s", facts.architecture, facts.format, megabytes, facts.path)
    groups = (config.model, config.load, config.cache, config.scheduler, config.parallel, config.observability)
    values = {item.name: getattr(group, item.name) for group in groups for item in dataclasses.fields(group)}
    chosen = [
        f"{name}={values[name]} ({reason})"
        for name, reason in config.reasons.items()
        if reason not in ("stated", "default") and name != "default_sampling_params"
    ]
    logger.info("chosen: %s", ", ".join(chosen))
    log_sampling_defaults(config)
    _log_not_applied(facts.generation_config)


def _log_not_applied(generation_config: dict[str, Any]) -> None:
    """``num_beams``, ``no_repeat_ngram_size`` and the like: somebody may count on them."""
    known = _NOT_ABOUT_SAMPLING.union(SAMPLING_DEFAULTS)
    left = [
        f"{name}={value!r:.40}"
        for name, value in generation_config.items()
        if value not in (None, False) and name not in known and not name.startswith("_")
    ]
    if left:
        logger.info("generation_config.json: not applied: %s", ", ".join(left))
