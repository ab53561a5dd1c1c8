"""Attention: the layer, the step's metadata and context, and the backends that own the layout of KV blocks."""

from octavo.attention.attention import Attention, attention_layers
from octavo.attention.backend import BACKENDS, AttentionBackend, TorchAttentionBackend, attention_backend
from octavo.attention.forward_context import get_forward_context, set_forward_context
from octavo.kernels import AttentionMetadata

__all__ = [
    "BACKENDS",
    "Attention",
    "AttentionBackend",
    "AttentionMetadata",
    "TorchAttentionBackend",
    "attention_backend",
    "attention_layers",
    "get_forward_context",
    "set_forward_context",
]
