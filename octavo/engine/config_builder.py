"""From stated options to the final configuration: finds the model, reads what it is, asks the machine what it has."""

import copy
import dataclasses
from collections.abc import Callable

from octavo.checkpoints import DEFAULT_MODEL, read_model_facts, resolve_model
from octavo.config import EngineArgs, OctavoConfig, resolve_config
from octavo.logging import init_logger
from octavo.platforms import current_platform
from octavo.types import ModelFacts

__all__ = ["build_config"]

logger = init_logger(__name__)

# Of generation_config.json; what a client does not state there has the API's default.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def build_config(args: EngineArgs, progress: Callable[[str, float], None] | None = None) -> OctavoConfig:
    """The final configuration, logged with the reason for every value that was chosen for this model and machine.

    Args:
        args: what was stated; without a model it is the demo model.
        progress: told of a download's stages.

    Raises:
        ModelError: MODEL is nothing that octavo can find or read.
        ConfigError: a stated value that this model or machine cannot have.
    """
    model_stated = "model" in args.stated["model"]
    if not model_stated:
        args = copy.deepcopy(args)
        args.stated["model"]["model"] = DEFAULT_MODEL
    facts = read_model_facts(resolve_model(args.stated["model"]["model"], progress))
    config = resolve_config(args, facts, current_platform().facts())
    if not model_stated:
        config = dataclasses.replace(config, reasons=config.reasons | {"model": "the demo model, as none was stated"})
    _log_choices(config)
    _log_not_applied(facts)
    return config


def _log_choices(config: OctavoConfig) -> None:
    groups = (config.model, config.cache, config.scheduler, config.parallel, config.observability)
    values = {item.name: getattr(group, item.name) for group in groups for item in dataclasses.fields(group)}
    chosen = [
        f"{name}={values[name]} ({reason})"
        for name, reason in config.reasons.items()
        if reason not in ("stated", "default")
    ]
    logger.info("chosen: %s", ", ".join(chosen))


def _log_not_applied(facts: ModelFacts) -> None:
    stated = [
        f"{name}={value}"
        for name in _SAMPLING_DEFAULTS
        if isinstance(value := facts.generation_config.get(name), int | float)
    ]
    if stated:
        logger.info(
            "generation_config.json recommends %s: not applied, requests state their own sampling", ", ".join(stated)
        )
