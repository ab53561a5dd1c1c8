"""What model families are built from. Parameters load themselves; arithmetic is left to kernels."""

from octavo.layers.activation import Gelu, activation
from octavo.layers.linear import GatedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.normalization import LayerNorm, RMSNorm
from octavo.layers.parameter import ShardId, WeightParameter
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding

__all__ = [
    "GatedColumnParallelLinear",
    "Gelu",
    "LayerNorm",
    "ParallelLMHead",
    "QKVParallelLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "ShardId",
    "VocabParallelEmbedding",
    "WeightParameter",
    "activation",
]
