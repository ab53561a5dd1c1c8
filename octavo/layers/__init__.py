"""What model families are built from. Parameters load themselves; arithmetic is left to kernels."""

from octavo.layers.activation import SiluAndMul
from octavo.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.normalization import RMSNorm
from octavo.layers.parameter import ShardId, WeightParameter
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding

__all__ = [
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
]
