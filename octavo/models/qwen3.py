"""Qwen3: a Llama that norms each head's query and key before it rotates them.

Windows as in Qwen2. ``attention_bias`` is off in the models that were published.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention import Attention
from octavo.layers import QKVParallelLinear, RMSNorm, RotaryEmbedding, RowParallelLinear
from octavo.models.llama import LlamaDecoderLayer, LlamaForCausalLM

__all__ = ["Qwen3ForCausalLM"]


class Qwen3Attention(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, index: int) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.head_size = config["head_dim"]
        bias = config["attention_bias"]
        self.qkv_proj = QKVParallelLinear(
            hidden_size, self.head_size, self.num_heads, self.num_kv_heads, bias=bias, dtype=dtype
        )
        self.o_proj = RowParallelLinear(self.num_heads * self.head_size, hidden_size, bias=bias, dtype=dtype)
        self.q_norm = RMSNorm(self.head_size, eps, dtype)
        self.k_norm = RMSNorm(self.head_size, eps, dtype)
        self.rotary_emb = rotary
        self.attn = Attention(
            f"model.layers.{index}.self_attn",
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.head_size**-0.5,
            sliding_window=config["sliding_window"] if config["layer_types"][index] == "sliding_attention" else None,
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj.forward_split(hidden)
        query, _ = self.q_norm(query.reshape(-1, self.num_heads, self.head_size))
        key, _ = self.k_norm(key.reshape(-1, self.num_kv_heads, self.head_size))
        query, key = self.rotary_emb(positions, query, key)
        output: Tensor = self.o_proj(self.attn(query, key, value))
        return output


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention_type = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_type = Qwen3DecoderLayer
