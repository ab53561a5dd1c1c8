"""Phi-3, Phi-3.5 mini, Phi-4, Phi-4 mini: a Llama whose merged weights are merged in the checkpoint already."""

from collections.abc import Mapping
from typing import Any

from octavo.checkpoints.families.family import Family, GGUFPart
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry

__all__ = ["FAMILY"]

_MAX = 2**31 - 1
# "longrope" was called "su" at first, and "yarn" in one release: it has never been the yarn of other models.
_LONGROPE = ("longrope", "su", "yarn")


def _prepare(config: dict[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for place in ("rope_scaling", "rope_parameters"):
        scaling = config.get(place)
        if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) in _LONGROPE:
            own = {key: value for key, value in scaling.items() if key != "type"}
            found[place] = {"original_max_position_embeddings": 4096, **own, "rope_type": "longrope"}
    return found


def _check(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    window = fields.integer("sliding_window", 1, _MAX, default=None)
    if window is not None and window >= found["max_position_embeddings"]:
        window = None  # it never ends: full attention, whose KV is easier to share
    return {"attention_bias": False, "mlp_bias": False, "sliding_window": window}


def _gguf_config(fields: Fields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    # llama.cpp looks at the whole context all the same; the window is what the model was trained with.
    return {"sliding_window": fields.integer("attention.sliding_window", 0, _MAX, default=0) or None}


FAMILY = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    prepare=_prepare,
    check=_check,
    partial_rotary=True,
    gguf=GGUFPart(
        architecture="phi3",
        block_names={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        config=_gguf_config,
    ),
)
