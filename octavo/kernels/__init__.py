"""Ops. An op is its torch definition; which provider computes it is chosen once, before a model is loaded."""

from octavo.kernels.activation import GeluForm, gelu, gelu_and_mul, silu_and_mul
from octavo.kernels.attention_metadata import AttentionMetadata, RowGroup
from octavo.kernels.embedding import embedding
from octavo.kernels.linear import linear
from octavo.kernels.logits import logits
from octavo.kernels.normalization import (
    add_to_residual,
    fused_add_layer_norm,
    fused_add_rms_norm,
    layer_norm,
    rms_norm,
)
from octavo.kernels.op import OPS, PROVIDERS, Op, Provider, chosen_provider, describe, kernel_set, op, select
from octavo.kernels.packed_weight import PackedWeight, Weight, pack_weight
from octavo.kernels.paged_attention import paged_attention, reshape_and_cache
from octavo.kernels.rotary import rotary_embedding

__all__ = [
    "OPS",
    "PROVIDERS",
    "AttentionMetadata",
    "GeluForm",
    "Op",
    "PackedWeight",
    "Provider",
    "RowGroup",
    "Weight",
    "add_to_residual",
    "chosen_provider",
    "describe",
    "embedding",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "gelu",
    "gelu_and_mul",
    "kernel_set",
    "layer_norm",
    "linear",
    "logits",
    "op",
    "pack_weight",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "select",
    "silu_and_mul",
]
