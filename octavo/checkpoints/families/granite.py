"""Granite 3: a Llama with four multipliers. In GGUF the dense models of Granite 4 are of this architecture too."""

from collections.abc import Mapping
from typing import Any

from octavo.checkpoints.families.family import Family, GGUFPart
from octavo.checkpoints.families.llama import BLOCK_NAMES, PERMUTED
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry, shown
from octavo.errors import UnsupportedError

__all__ = ["DEFAULTS", "FAMILY", "check_granite"]

# A null attention_multiplier, which only GGUF files have, is the usual 1/√head_dim.
DEFAULTS = {"max_position_embeddings": 2048, "attention_multiplier": 1.0}
_SMALLEST, _LARGEST = 1e-9, 1e9
_POSITIONS = ("rope", "nope")


def check_granite(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    def multiplier(key: str, default: float) -> float:
        value: float = fields.number(key, _SMALLEST, _LARGEST, default=default)
        return value

    position = fields.string("position_embedding_type", default="rope")
    if position not in _POSITIONS:
        raise UnsupportedError(
            f"{fields.file}: position_embedding_type {shown(position)} is not supported; "
            f"supported: {', '.join(_POSITIONS)}"
        )
    return {
        "attention_bias": fields.boolean("attention_bias", default=False),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "position_embedding_type": position,
        "embedding_multiplier": multiplier("embedding_multiplier", 1.0),
        "attention_multiplier": multiplier("attention_multiplier", found["head_dim"] ** -0.5),
        "residual_multiplier": multiplier("residual_multiplier", 1.0),
        "logits_scaling": multiplier("logits_scaling", 1.0),
    }


def _gguf_config(fields: Fields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    def scale(key: str) -> float | None:
        """0 stands for what is usual."""
        return fields.number(key, 0.0, _LARGEST, default=0.0) or None

    # This flag has another meaning in other architectures; in this one it says whether anything is rotated.
    rotated = fields.boolean("rope.scaling.finetuned", default=True)
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "position_embedding_type": "rope" if rotated else "nope",
        "embedding_multiplier": scale("embedding_scale"),
        "attention_multiplier": scale("attention.scale"),
        "residual_multiplier": scale("residual_scale"),
        "logits_scaling": scale("logit_scale"),
    }


FAMILY = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    defaults=DEFAULTS,
    check=check_granite,
    gguf=GGUFPart(
        architecture="granite",
        block_names=BLOCK_NAMES,
        permuted=PERMUTED,
        config=_gguf_config,
        reads=("embedding_scale", "attention.scale", "residual_scale", "logit_scale"),
    ),
)
