"""StableLM 3B, StableLM 2 1.6B and 12B: LayerNorms, partial rotation, and norms of each head in the largest."""

from collections.abc import Mapping
from typing import Any

from octavo.checkpoints.families.family import Family, GGUFPart
from octavo.checkpoints.families.llama import BLOCK_NAMES
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry

__all__ = ["FAMILY"]


def _check(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "mlp_bias": False,
        "use_qkv_bias": fields.boolean("use_qkv_bias", default=False),
        "qk_layernorm": fields.boolean("qk_layernorm", default=False),
        "use_parallel_residual": fields.boolean("use_parallel_residual", default=False),
    }


def _gguf_config(fields: Fields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
        # Not the metadata of this name: files of sequential models say true there, and llama.cpp does not look.
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
    }


FAMILY = Family(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
    },
    check=_check,
    eps_field="layer_norm_eps",
    partial_rotary=True,
    gguf=GGUFPart(
        architecture="stablelm",
        block_names=BLOCK_NAMES | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
        flattened=("attn_q_norm", "attn_k_norm"),
        config=_gguf_config,
    ),
)
