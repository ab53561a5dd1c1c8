"""Mistral: a Llama whose layers all look at a window. In GGUF it is a llama with a sliding window."""

from typing import Any

from octavo.checkpoints.families.family import Family
from octavo.checkpoints.json_file import Fields

__all__ = ["FAMILY"]


def _check(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": fields.boolean("attention_bias", default=False),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "sliding_window": fields.integer("sliding_window", 1, 2**31 - 1, default=None),
    }


FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    check=_check,
)
