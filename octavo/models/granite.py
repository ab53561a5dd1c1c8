"""The Granite family: Granite 3, and the dense models of Granite 4 (see granite4.py).

A Llama with four numbers more: the embedding's vectors, the attention's scores, what a block adds to the residual, and
the logits are each multiplied by one of them. Some models of Granite 4 rotate nothing ("nope").
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from octavo.config import ModelConfig
from octavo.layers import RMSNorm
from octavo.models.causal_lm import CausalLM, rotary_embedding
from octavo.models.llama import LlamaAttention, LlamaDecoderLayer

__all__ = ["GraniteDecoderLayer", "GraniteForCausalLM"]


class GraniteDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, self_attn: LlamaAttention) -> None:
        super().__init__(config, dtype, self_attn, residual_multiplier=config["residual_multiplier"])


class GraniteForCausalLM(CausalLM):
    """Attributes:

    layer_type: what the model is made of.
    """

    layer_type: Callable[[dict[str, Any], torch.dtype, LlamaAttention], nn.Module] = GraniteDecoderLayer

    def __init__(self, model_config: ModelConfig) -> None:
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        rotary = rotary_embedding(model_config) if config["position_embedding_type"] == "rope" else None
        layers = []
        for index in range(config["num_hidden_layers"]):
            attention = LlamaAttention(
                config,
                dtype,
                rotary,
                index,
                scale=config["attention_multiplier"],
                residual_multiplier=config["residual_multiplier"],
            )
            layers.append(self.layer_type(config, dtype, attention))
        super().__init__(
            model_config,
            layers,
            RMSNorm(config["hidden_size"], config["rms_norm_eps"], dtype),
            embedding_scale=config["embedding_multiplier"],
            logits_scale=1.0 / config["logits_scaling"],
        )
