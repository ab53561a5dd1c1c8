"""SmolLM3: a Llama that rotates nothing in some layers (every fourth): these know positions by their order only.

With ``use_sliding_window`` some layers look at a window.
"""

import torch

from octavo.config import ModelConfig
from octavo.layers import RMSNorm
from octavo.models.causal_lm import CausalLM, rotary_embedding
from octavo.models.llama import LlamaAttention, LlamaDecoderLayer, layer_window

__all__ = ["SmolLM3ForCausalLM"]


class SmolLM3ForCausalLM(CausalLM):
    def __init__(self, model_config: ModelConfig) -> None:
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        rotary = rotary_embedding(model_config)
        layers = []
        # The list says where there is rope, whatever its name.
        for index, rotates in enumerate(config["no_rope_layers"]):
            window = layer_window(config, index)
            attention = LlamaAttention(config, dtype, rotary if rotates else None, index, sliding_window=window)
            layers.append(LlamaDecoderLayer(config, dtype, attention))
        super().__init__(model_config, layers, RMSNorm(config["hidden_size"], config["rms_norm_eps"], dtype))
