"""Llama 2 and 3, SmolLM2. Mistral's GGUF files are of llama.cpp's llama architecture too."""

from collections.abc import Mapping
from typing import Any

from octavo.checkpoints.families.family import Family, GGUFPart
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry

__all__ = ["BLOCK_NAMES", "FAMILY", "PERMUTED"]

# Shared by the many families whose layers are a Llama's.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def _check(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": fields.boolean("attention_bias", default=False),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "sliding_window": None,
    }


def _gguf_config(fields: Fields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    sliding_window = fields.integer("attention.sliding_window", 0, 2**31 - 1, default=0) or None
    return {
        "architectures": ["MistralForCausalLM" if sliding_window else "LlamaForCausalLM"],
        "model_type": "mistral" if sliding_window else "llama",
        "sliding_window": sliding_window,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults={"max_position_embeddings": 2048},
    check=_check,
    gguf=GGUFPart(architecture="llama", block_names=BLOCK_NAMES, permuted=PERMUTED, config=_gguf_config),
)
