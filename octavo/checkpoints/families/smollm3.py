"""SmolLM3: layers without rotation, and windows where use_sliding_window says so.

llama.cpp writes no list of the layers without rotation: it takes every fourth for one.
"""

from collections.abc import Mapping
from typing import Any

from octavo.checkpoints.families.family import Family, GGUFPart, read_layer_types
from octavo.checkpoints.families.llama import BLOCK_NAMES, PERMUTED
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry

__all__ = ["FAMILY"]

_MAX = 2**31 - 1


def _check(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    num_layers = found["num_hidden_layers"]
    rotates = _rotating_layers(fields, num_layers)
    window = fields.integer("sliding_window", 1, _MAX, default=None)
    if window is None or not fields.boolean("use_sliding_window", default=False):
        window, layer_types = None, ["full_attention"] * num_layers
    else:
        default = ["full_attention" if rotated else "sliding_attention" for rotated in rotates]
        layer_types = read_layer_types(fields, num_layers, default)
    return {
        "attention_bias": fields.boolean("attention_bias", default=False),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "no_rope_layers": rotates,
        "sliding_window": window,
        "layer_types": layer_types,
    }


def _rotating_layers(fields: Fields, num_layers: int) -> list[int]:
    """1 for each layer that rotates, 0 for the others: what ``no_rope_layers`` means, in spite of its name."""
    stated = fields.values.get("no_rope_layers")
    if stated is None:
        interval = fields.integer("no_rope_layer_interval", 1, _MAX, default=4)
        return [int((index + 1) % interval != 0) for index in range(num_layers)]
    if not isinstance(stated, list) or len(stated) < num_layers or not all(item in (0, 1) for item in stated):
        raise fields.wrong("no_rope_layers", f"a list of 0 and 1 for each of {num_layers} layers")
    return [int(item) for item in stated[:num_layers]]


def _gguf_config(fields: Fields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
    check=_check,
    gguf=GGUFPart(architecture="smollm3", block_names=BLOCK_NAMES, permuted=PERMUTED, config=_gguf_config),
)
