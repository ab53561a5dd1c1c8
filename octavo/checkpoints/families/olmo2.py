"""OLMo 2: a Llama whose norms come after the blocks, and which norms Q and K. llama.cpp permutes nothing."""

from collections.abc import Mapping
from typing import Any

from octavo.checkpoints.families.family import Family, GGUFPart
from octavo.checkpoints.families.llama import BLOCK_NAMES
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry
from octavo.errors import UnsupportedError

__all__ = ["FAMILY"]


def _check(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": fields.boolean("attention_bias", default=False), "mlp_bias": False}


def _gguf_config(fields: Fields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    if fields.integer("attention.sliding_window", 0, 2**31 - 1, default=0):
        raise UnsupportedError(f"{fields.file}: {fields.where}attention.sliding_window: OLMo 3 is not supported yet")
    return {}


FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    check=_check,
    gguf=GGUFPart(
        architecture="olmo2",
        block_names={part: name for part, name in BLOCK_NAMES.items() if not part.endswith("norm")}
        | {
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        config=_gguf_config,
    ),
)
