"""Gemma 2: soft caps, norms on both sides of each block, every other layer with a sliding window.

What a block adds to the residual is normed too, so a layer has four norms. Their weights are stored as the distance
from 1. The embedding is the head as well, and is scaled by √hidden_size on its way in only.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.config import ModelConfig
from octavo.layers import RMSNorm
from octavo.models.causal_lm import CausalLM, rotary_embedding
from octavo.models.llama import LlamaAttention, LlamaMLP, layer_window

__all__ = ["Gemma2ForCausalLM", "GemmaCausalLM", "gemma_norm"]


def gemma_norm(size: int, config: dict[str, Any], dtype: torch.dtype) -> RMSNorm:
    """A norm whose weights are stored as the distance from 1."""
    return RMSNorm(size, config["rms_norm_eps"], dtype, weight_offset=1.0)


class Gemma2DecoderLayer(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, self_attn: LlamaAttention) -> None:
        super().__init__()
        hidden_size = config["hidden_size"]
        self.input_layernorm = gemma_norm(hidden_size, config, dtype)
        self.self_attn = self_attn
        self.post_attention_layernorm = gemma_norm(hidden_size, config, dtype)
        self.pre_feedforward_layernorm = gemma_norm(hidden_size, config, dtype)
        self.mlp = LlamaMLP(config, dtype)
        self.post_feedforward_layernorm = gemma_norm(hidden_size, config, dtype)

    def forward(self, positions: Tensor, residual: Tensor) -> Tensor:
        attended = self.self_attn(positions, self.input_layernorm(residual))
        residual = self.post_attention_layernorm.add_to(residual, attended)
        computed = self.mlp(self.pre_feedforward_layernorm(residual))
        return self.post_feedforward_layernorm.add_to(residual, computed)


class GemmaCausalLM(CausalLM):
    """What Gemma 2 and 3 share: all but the attention.

    Args:
        attention: of each layer, first to last.
    """

    def __init__(self, model_config: ModelConfig, attention: Iterable[LlamaAttention]) -> None:
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        hidden_size = config["hidden_size"]
        super().__init__(
            model_config,
            [Gemma2DecoderLayer(config, dtype, self_attn) for self_attn in attention],
            gemma_norm(hidden_size, config, dtype),
            # The model was trained with a factor in the data type of its weights (55.5 for √3072 in bfloat16).
            embedding_scale=torch.tensor(hidden_size**0.5, dtype=dtype).item(),
            logits_soft_cap=config["final_logit_softcapping"],
        )


class Gemma2ForCausalLM(GemmaCausalLM):
    def __init__(self, model_config: ModelConfig) -> None:
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        rotary = rotary_embedding(model_config)
        attention = [
            LlamaAttention(
                config,
                dtype,
                rotary,
                index,
                scale=config["query_pre_attn_scalar"] ** -0.5,
                sliding_window=layer_window(config, index),
                logits_soft_cap=config["attn_logit_softcapping"],
            )
            for index in range(config["num_hidden_layers"])
        ]
        super().__init__(model_config, attention)
