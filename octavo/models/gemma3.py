"""Gemma 3 (text): Gemma 2 with another attention.

Heads of Q and K are normed instead of soft-capped, most layers have a sliding window (five of six), and those turn by
a base of their own, without the scaling that stretches the others' context.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from octavo.config import ModelConfig
from octavo.layers import RotaryEmbedding
from octavo.models.gemma2 import Gemma2Attention, Gemma2DecoderLayer, Gemma2ForCausalLM, gemma_norm

__all__ = ["Gemma3ForCausalLM"]


class Gemma3Attention(Gemma2Attention):
    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, layer_type: str, name: str
    ) -> None:
        super().__init__(config, dtype, rotary, layer_type, name)
        self.q_norm = gemma_norm(self.head_size, config, dtype)
        self.k_norm = gemma_norm(self.head_size, config, dtype)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj.forward_split(hidden)
        query = self.q_norm.normed(query.view(-1, self.num_heads, self.head_size))
        key = self.k_norm.normed(key.view(-1, self.num_kv_heads, self.head_size))
        query, key = self.rotary_emb(positions, query, key)
        output: Tensor = self.o_proj(self.attn(query, key, value))
        return output


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    def make_layers(self, model_config: ModelConfig) -> Iterator[Gemma2DecoderLayer]:
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        shape = (config["head_dim"], model_config.max_model_len)
        rotary = {
            "full_attention": RotaryEmbedding(*shape, config["rope_theta"], config["rope_scaling"]),
            "sliding_attention": RotaryEmbedding(*shape, config["rope_local_base_freq"]),
        }
        for index, layer_type in enumerate(config["layer_types"]):
            name = f"model.layers.{index}.self_attn"
            attention = Gemma3Attention(config, dtype, rotary[layer_type], layer_type, name)
            yield Gemma2DecoderLayer(config, dtype, attention)
