"""Gemma 2: layers with and without a sliding window take turns; soft caps; norms stored as the distance from 1.

llama.cpp stores norms with the 1 added. It does not store what the scores are divided by: that follows from the size
of the model.
"""

from collections.abc import Mapping
from typing import Any

from octavo.checkpoints.families.family import Family, GGUFPart, read_layer_types
from octavo.checkpoints.families.llama import BLOCK_NAMES
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry
from octavo.errors import UnsupportedError

__all__ = ["ACTIVATIONS", "FAMILY", "GEMMA_BLOCK_NAMES", "check_gemma", "periodic_layer_types", "with_activation"]

_MAX = 2**31 - 1
ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")
GEMMA_BLOCK_NAMES = BLOCK_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Layers of the one size whose heads are not as long as the root of what scores are divided by.
_LAYERS_OF_27B = 46


def with_activation(config: dict[str, Any]) -> dict[str, Any]:
    """``hidden_activation`` is what counts; an old ``hidden_act`` beside it was never used."""
    return config | {"hidden_act": config.get("hidden_activation")}


def periodic_layer_types(num_layers: int, period: int) -> list[str]:
    """The last of every ``period`` layers sees everything, the others a window."""
    return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(num_layers)]


def check_gemma(fields: Fields, layer_types: list[str]) -> dict[str, Any]:
    """What Gemma 2 and 3 share. Raises CheckpointError and UnsupportedError."""
    if fields.boolean("use_bidirectional_attention", default=False):
        raise UnsupportedError(f"{fields.file}: use_bidirectional_attention: octavo has causal models only")
    sliding_window = fields.integer("sliding_window", 1, _MAX, default=None)
    if sliding_window is None and "sliding_attention" in layer_types:
        raise fields.wrong("sliding_window", "a number of tokens, as there are sliding_attention layers")
    return {
        "attention_bias": fields.boolean("attention_bias", default=False),
        "query_pre_attn_scalar": fields.number("query_pre_attn_scalar", 1e-3, 1e6),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 1e-3, 1e6, default=None),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 1e-3, 1e6, default=None),
        "sliding_window": sliding_window,
        "layer_types": layer_types,
    }


def _check(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    num_layers = found["num_hidden_layers"]
    return check_gemma(fields, read_layer_types(fields, num_layers, periodic_layer_types(num_layers, 2)))


def _gguf_config(fields: Fields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    hidden_size, heads = fields.integer("embedding_length", 1, _MAX), fields.integer("attention.head_count", 1, _MAX)
    largest = fields.integer("block_count", 1, _MAX) == _LAYERS_OF_27B
    return {
        "query_pre_attn_scalar": hidden_size // heads if largest else fields.integer("attention.key_length", 1, _MAX),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 0.0, 1e6, default=50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0, 1e6, default=30.0),
        "sliding_window": fields.integer("attention.sliding_window", 1, _MAX, default=4096),
    }


FAMILY = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    defaults={
        "head_dim": 256,
        "hidden_activation": ACTIVATIONS[0],
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    prepare=with_activation,
    check=_check,
    activations=ACTIVATIONS,
    gguf=GGUFPart(
        architecture="gemma2",
        block_names=GEMMA_BLOCK_NAMES,
        norm_offset=-1.0,
        config=_gguf_config,
        reads=("attn_logit_softcapping", "final_logit_softcapping"),
    ),
)
