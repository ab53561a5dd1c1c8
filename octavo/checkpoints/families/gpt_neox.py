"""GPT-NeoX and Pythia. Their config.json spells the rotary settings in a way of its own, and the checkpoint has query,
key and value of a head side by side; llama.cpp puts them in order."""

import re
from collections.abc import Mapping
from typing import Any

from octavo.checkpoints.families.family import Family, GGUFPart
from octavo.checkpoints.families.placement import Placement, RowOrder
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry

__all__ = ["FAMILY"]

_QKV = re.compile(r"gpt_neox\.layers\.[0-9]+\.attention\.query_key_value\.(weight|bias)")
_OLD_NAMES = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}


def _prepare(config: dict[str, Any]) -> dict[str, Any]:
    return {_OLD_NAMES.get(key, key): value for key, value in config.items()}


def _check(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_key_value_heads": found["num_attention_heads"],
        "attention_bias": fields.boolean("attention_bias", default=True),
        "use_parallel_residual": fields.boolean("use_parallel_residual", default=True),
    }


def _place(name: str, config: dict[str, Any]) -> Placement:
    if _QKV.fullmatch(name):
        return Placement(name, RowOrder((config["num_attention_heads"], 3, config["head_dim"]), (1, 0, 2)))
    return Placement("lm_head.weight" if name == "embed_out.weight" else name)


def _gguf_config(fields: Fields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    return {
        "hidden_act": "gelu",
        "attention_bias": "blk.0.attn_qkv.bias" in tensors,
        "use_parallel_residual": fields.boolean("use_parallel_residual", default=True),
    }


FAMILY = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    defaults={"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    prepare=_prepare,
    check=_check,
    eps_field="layer_norm_eps",
    activations=("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    partial_rotary=True,
    place=_place,
    # Masks and tables that old checkpoints carry.
    ignored=(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    gguf=GGUFPart(
        architecture="gptneox",
        block_names={
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        outer_names={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "lm_head",
        },
        layers="gpt_neox.layers",
        config=_gguf_config,
    ),
)
