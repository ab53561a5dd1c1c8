"""The sampling parameters of a request that states none: the model's own recommendations."""

from octavo.config import ModelConfig, OctavoConfig
from octavo.logging import init_logger
from octavo.types import SamplingParams

__all__ = ["default_sampling_params", "log_sampling_defaults"]

logger = init_logger(__name__)


def default_sampling_params(model: ModelConfig, max_model_len: int) -> SamplingParams:
    """A new SamplingParams with the model's defaults, and octavo's where it has none."""
    values = dict(model.default_sampling_params)
    if (values.get("max_tokens") or 0) >= max_model_len:
        values["max_tokens"] = None  # more than ever fits: as many as fit
    return SamplingParams(**values)


def log_sampling_defaults(config: OctavoConfig) -> None:
    """Says once what requests get that state nothing."""
    defaults = config.model.default_sampling_params
    if defaults:
        source = config.reasons.get("default_sampling_params", "generation_config.json")
        values = ", ".join(f"{name}={value}" for name, value in defaults.items())
        logger.info("%s: %s; applied where a request states none", source, values)
