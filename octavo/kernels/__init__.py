"""Ops. An op is its torch definition; which provider computes it is chosen once, before a model is loaded."""

from octavo.kernels.activation import GateForm, GeluForm, gelu
from octavo.kernels.attention_metadata import AttentionMetadata, RowGroup
from octavo.kernels.dequantize import dequantize
from octavo.kernels.embedding import embedding
from octavo.kernels.linear import gated_linear, linear, linear_add
from octavo.kernels.logits import logits
from octavo.kernels.memory import huge_memory
from octavo.kernels.normalization import cast, layer_norm, rms_norm, rms_norm_add
from octavo.kernels.op import (
    OPS,
    PROVIDERS,
    Op,
    Provider,
    RecordedForward,
    chosen_provider,
    describe,
    kernel_set,
    op,
    record_forward,
    select,
)
from octavo.kernels.packed_weight import (
    MergedWeight,
    PackedWeight,
    Weight,
    empty_weight,
    fill_blocks,
    fill_rows,
    filled,
    filled_bytes,
    keeps,
    pack_blocks,
    pack_weight,
    widened_in_products,
)
from octavo.kernels.paged_attention import paged_attention, reshape_and_cache, rotary_and_cache
from octavo.kernels.quantize import quantize

__all__ = [
    "OPS",
    "PROVIDERS",
    "AttentionMetadata",
    "GateForm",
    "GeluForm",
    "MergedWeight",
    "Op",
    "PackedWeight",
    "Provider",
    "RecordedForward",
    "RowGroup",
    "Weight",
    "cast",
    "chosen_provider",
    "dequantize",
    "describe",
    "embedding",
    "empty_weight",
    "fill_blocks",
    "fill_rows",
    "filled",
    "filled_bytes",
    "gated_linear",
    "gelu",
    "huge_memory",
    "keeps",
    "kernel_set",
    "layer_norm",
    "linear",
    "linear_add",
    "logits",
    "op",
    "pack_blocks",
    "pack_weight",
    "paged_attention",
    "quantize",
    "record_forward",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_add",
    "rotary_and_cache",
    "select",
    "widened_in_products",
]
