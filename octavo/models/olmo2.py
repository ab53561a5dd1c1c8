"""OLMo 2: norms after the blocks only, and Q and K normed over all their heads together.

Attention and MLP see the residual stream as it is, rounded to the model's type; what they add to it is normed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.config import ModelConfig
from octavo.layers import RMSNorm
from octavo.models.causal_lm import CausalLM, rotary_embedding
from octavo.models.llama import LlamaAttention, LlamaMLP

__all__ = ["Olmo2ForCausalLM"]


class NormOfAllHeads(RMSNorm):
    """One norm over the heads of a token together."""

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, heads, head_size] → [num_tokens, heads × head_size]."""
        return super().forward(x.flatten(1))


class Olmo2DecoderLayer(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, self_attn: LlamaAttention) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.dtype = dtype
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, dtype)
        self.mlp = LlamaMLP(config, dtype)
        self.post_feedforward_layernorm = RMSNorm(hidden_size, eps, dtype)

    def forward(self, positions: Tensor, residual: Tensor) -> Tensor:
        attended = self.self_attn(positions, kernels.cast(residual, self.dtype))
        residual = self.post_attention_layernorm.add_to(residual, attended)
        computed = self.mlp(kernels.cast(residual, self.dtype))
        return self.post_feedforward_layernorm.add_to(residual, computed)


class Olmo2ForCausalLM(CausalLM):
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
                q_norm=NormOfAllHeads(config["num_attention_heads"] * head_size, eps, dtype),
                k_norm=NormOfAllHeads(config["num_key_value_heads"] * head_size, eps, dtype),
            )
            layers.append(Olmo2DecoderLayer(config, dtype, attention))
        super().__init__(model_config, layers, RMSNorm(config["hidden_size"], eps, dtype))
