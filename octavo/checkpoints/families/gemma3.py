"""Gemma 3, the text model: alone, or as part of one that sees images too (whose other parts are left out).

Layers with a sliding window turn by a base of their own, ``rope_local_base_freq``, without scaling; ``rope_theta`` and
``rope_scaling`` are those of the layers that see everything.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.checkpoints.families.family import Family, GGUFPart, read_layer_types
from octavo.checkpoints.families.gemma2 import (
    ACTIVATIONS,
    GEMMA_BLOCK_NAMES,
    check_gemma,
    periodic_layer_types,
    with_activation,
)
from octavo.checkpoints.families.placement import Placement
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry
from octavo.errors import UnsupportedError
from octavo.logging import init_logger

__all__ = ["FAMILY", "FAMILY_WITH_IMAGES"]

logger = init_logger(__name__)

_MAX = 2**31 - 1
_LOCAL_BASE = 10000.0
_PERIOD = 6
# Layers of the one size whose heads are not as long as the root of what scores are divided by.
_LAYERS_OF_27B = 62
_SLIDING_ROPE = "sliding_rope_parameters"
# The text model's tensors have been saved under two prefixes.
_TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}


def _prepare(config: dict[str, Any]) -> dict[str, Any]:
    """Newer files have two ``rope_parameters``, one for each kind of layer."""
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and ("full_attention" in rope or "sliding_attention" in rope):
        config = config | {
            "rope_parameters": rope.get("full_attention"),
            _SLIDING_ROPE: rope.get("sliding_attention"),
        }
    return with_activation(config)


def _prepare_with_images(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if isinstance(text, dict):
        others = {key: value for key, value in config.items() if key not in ("text_config", "vision_config")}
        config = text | others
    return _prepare(config)


def _check(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    num_layers = found["num_hidden_layers"]
    period = fields.integer("sliding_window_pattern", 1, _MAX, default=_PERIOD)
    layer_types = read_layer_types(fields, num_layers, periodic_layer_types(num_layers, period))
    settings = check_gemma(fields, layer_types)
    if settings["attn_logit_softcapping"] is not None:
        raise UnsupportedError(f"{fields.file}: attn_logit_softcapping: Gemma 3 has none")
    sliding = fields.nested(_SLIDING_ROPE) or Fields({}, fields.file)
    if sliding.string("rope_type", default="default") != "default":
        raise UnsupportedError(f"{fields.file}: rope_parameters.sliding_attention: only rope_type default is supported")
    local_base = fields.number("rope_local_base_freq", 1.0001, 1e12, default=_LOCAL_BASE)
    return settings | {"rope_local_base_freq": sliding.number("rope_theta", 1.0001, 1e12, default=local_base)}


def _check_with_images(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    logger.info("%s: only the text model is loaded: octavo does not read images yet", fields.file)
    return _check(fields, found)


def _place_text(name: str, config: dict[str, Any]) -> Placement | None:
    for prefix, ours in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return Placement(ours + name.removeprefix(prefix))
    return Placement(name) if name == "lm_head.weight" else None


def _gguf_layer_types(fields: Fields, num_layers: int) -> list[str]:
    if "attention.sliding_window" not in fields.values:
        return ["full_attention"] * num_layers
    pattern = fields.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise fields.wrong("attention.sliding_window_pattern", f"one value for each of {num_layers} layers")
        return ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
    period = fields.integer("attention.sliding_window_pattern", 1, _MAX, default=_PERIOD)
    return periodic_layer_types(num_layers, period)


def _gguf_config(fields: Fields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    hidden_size, heads = fields.integer("embedding_length", 1, _MAX), fields.integer("attention.head_count", 1, _MAX)
    num_layers = fields.integer("block_count", 1, _MAX)
    largest = num_layers == _LAYERS_OF_27B
    return {
        "query_pre_attn_scalar": hidden_size // heads if largest else fields.integer("attention.key_length", 1, _MAX),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0, 1e6, default=0.0) or None,
        "sliding_window": fields.integer("attention.sliding_window", 1, _MAX, default=None),
        "layer_types": _gguf_layer_types(fields, num_layers),
        "rope_theta": fields.number("rope.freq_base", 1.0001, 1e12, default=1e6),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 1.0001, 1e12, default=_LOCAL_BASE),
    }


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": ACTIVATIONS[0],
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1e6,
    },
    prepare=_prepare,
    check=_check,
    activations=ACTIVATIONS,
    gguf=GGUFPart(
        architecture="gemma3",
        block_names=GEMMA_BLOCK_NAMES | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
        norm_offset=-1.0,
        config=_gguf_config,
        reads=("final_logit_softcapping",),
    ),
)

FAMILY_WITH_IMAGES = replace(
    FAMILY,
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    prepare=_prepare_with_images,
    check=_check_with_images,
    place=_place_text,
    gguf=None,
)
