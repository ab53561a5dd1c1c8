"""Qwen3: a Llama that norms each head's query and key before it rotates them.

Windows as in Qwen2. ``attention_bias`` is off in the models that were published.
"""

import torch

from octavo.config import ModelConfig
from octavo.layers import RMSNorm
from octavo.models.causal_lm import CausalLM, rotary_embedding
from octavo.models.llama import LlamaAttention, LlamaDecoderLayer, layer_window

__all__ = ["Qwen3ForCausalLM"]


class Qwen3ForCausalLM(CausalLM):
    def __init__(self, model_config: ModelConfig) -> None:
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        eps, head_size = config["rms_norm_eps"], config["head_dim"]
        rotary = rotary_embedding(model_config)
        layers = []
        for index in range(config["num_hidden_layers"]):
            attention = LlamaAttention(
                config,
                dtype,
                rotary,
                index,
                sliding_window=layer_window(config, index),
                q_norm=RMSNorm(head_size, eps, dtype),
                k_norm=RMSNorm(head_size, eps, dtype),
            )
            layers.append(LlamaDecoderLayer(config, dtype, attention))
        super().__init__(model_config, layers, RMSNorm(config["hidden_size"], eps, dtype))
