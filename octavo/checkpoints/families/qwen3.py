"""Qwen3, the dense models. Windows as in Qwen2."""

from collections.abc import Mapping
from typing import Any

from octavo.checkpoints.families.family import Family, GGUFPart
from octavo.checkpoints.families.llama import BLOCK_NAMES
from octavo.checkpoints.families.qwen2 import DEFAULTS, check_windows
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry

__all__ = ["FAMILY"]


def _check(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    return check_windows(fields, found) | {
        "attention_bias": fields.boolean("attention_bias", default=False),
        "mlp_bias": False,
    }


def _gguf_config(fields: Fields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in tensors}


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults=DEFAULTS | {"head_dim": 128},
    check=_check,
    gguf=GGUFPart(
        architecture="qwen3",
        block_names=BLOCK_NAMES | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
        config=_gguf_config,
    ),
)
