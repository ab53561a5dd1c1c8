"""What model families are built from. Parameters load themselves; arithmetic is left to kernels."""

from octavo.layers.activation import Gelu, GeluAndMul, SiluAndMul, activation, gated_activation
from octavo.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.normalization import LayerNorm, RMSNorm
from octavo.layers.parameter import ShardId, WeightParameter
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding

__all__ = [
    "Gelu",
    "GeluAndMul",
    "LayerNorm",
    "MergedColumnParallelLinear",
    "ParallelLMHead",
    "QKVParallelLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "ShardId",
    "SiluAndMul",
    "VocabParallelEmbedding",
    "WeightParameter",
    "activation",
    "gated_activation",
]
