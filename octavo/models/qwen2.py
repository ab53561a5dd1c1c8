"""Qwen2 and Qwen2.5: a Llama whose query, key and value have biases, and the output has none.

With ``use_sliding_window`` the upper layers, from ``max_window_layers`` on, look at a window.
"""

import torch

from octavo.config import ModelConfig
from octavo.layers import RMSNorm
from octavo.models.causal_lm import CausalLM, rotary_embedding
from octavo.models.llama import LlamaAttention, LlamaDecoderLayer, layer_window

__all__ = ["Qwen2ForCausalLM"]


class Qwen2ForCausalLM(CausalLM):
    def __init__(self, model_config: ModelConfig) -> None:
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        rotary = rotary_embedding(model_config)
        layers = []
        for index in range(config["num_hidden_layers"]):
            window = layer_window(config, index)
            attention = LlamaAttention(
                config, dtype, rotary, index, qkv_bias=True, output_bias=False, sliding_window=window
            )
            layers.append(LlamaDecoderLayer(config, dtype, attention))
        super().__init__(model_config, layers, RMSNorm(config["hidden_size"], config["rms_norm_eps"], dtype))
