"""Gemma 3 (text): Gemma 2 with another attention.

Heads of Q and K are normed instead of soft-capped, most layers have a sliding window (five of six), and those turn by
a base of their own, without the scaling that stretches the others' context.
"""

import torch

from octavo.config import ModelConfig
from octavo.layers import RotaryEmbedding
from octavo.models.causal_lm import rotary_embedding
from octavo.models.gemma2 import GemmaCausalLM, gemma_norm
from octavo.models.llama import LlamaAttention, layer_window

__all__ = ["Gemma3ForCausalLM"]


class Gemma3ForCausalLM(GemmaCausalLM):
    def __init__(self, model_config: ModelConfig) -> None:
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        head_size = config["head_dim"]
        rotary = {
            "full_attention": rotary_embedding(model_config),
            "sliding_attention": RotaryEmbedding(head_size, model_config.max_model_len, config["rope_local_base_freq"]),
        }
        attention = [
            LlamaAttention(
                config,
                dtype,
                rotary[layer_type],
                index,
                scale=config["query_pre_attn_scalar"] ** -0.5,
                sliding_window=layer_window(config, index),
                logits_soft_cap=config["attn_logit_softcapping"],
                q_norm=gemma_norm(head_size, config, dtype),
                k_norm=gemma_norm(head_size, config, dtype),
            )
            for index, layer_type in enumerate(config["layer_types"])
        ]
        super().__init__(model_config, attention)
