"""Qwen2 and Qwen2.5. A window only where use_sliding_window says so, and then from layer max_window_layers on."""

from typing import Any

from octavo.checkpoints.families.family import Family, GGUFPart, read_layer_types
from octavo.checkpoints.families.llama import BLOCK_NAMES
from octavo.checkpoints.json_file import Fields
from octavo.logging import init_logger

__all__ = ["DEFAULTS", "FAMILY", "check_windows"]

logger = init_logger(__name__)

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def check_windows(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    """``sliding_window`` and ``layer_types``."""
    num_layers = found["num_hidden_layers"]
    window = fields.integer("sliding_window", 1, 2**31 - 1, default=None)
    if window is None or not fields.boolean("use_sliding_window", default=False):
        return {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}
    first = min(fields.integer("max_window_layers", 0, 2**31 - 1), num_layers)
    default = ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    return {"sliding_window": window, "layer_types": read_layer_types(fields, num_layers, default)}


def _check(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    if fields.values.get("dual_chunk_attention_config"):
        logger.warning(
            "%s: dual_chunk_attention_config is not followed: attention is over the whole context, as transformers "
            "computes it; far beyond the length that the model was trained at its answers will differ",
            fields.file,
        )
    return check_windows(fields, found) | {"mlp_bias": False}


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults=DEFAULTS,
    check=_check,
    gguf=GGUFPart(architecture="qwen2", block_names=BLOCK_NAMES),
)
