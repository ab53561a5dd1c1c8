"""SmolLM3: a Llama that rotates nothing in some layers (every fourth): these know positions by their order only.

With ``use_sliding_window`` some layers look at a window.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention import Attention
from octavo.layers import QKVParallelLinear, RotaryEmbedding, RowParallelLinear
from octavo.models.llama import LlamaDecoderLayer, LlamaForCausalLM

__all__ = ["SmolLM3ForCausalLM"]


class SmolLM3Attention(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, index: int) -> None:
        super().__init__()
        hidden_size = config["hidden_size"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.head_size = config["head_dim"]
        bias = config["attention_bias"]
        self.qkv_proj = QKVParallelLinear(
            hidden_size, self.head_size, self.num_heads, self.num_kv_heads, bias=bias, dtype=dtype
        )
        self.o_proj = RowParallelLinear(self.num_heads * self.head_size, hidden_size, bias=bias, dtype=dtype)
        # The list says where there is rope, whatever its name.
        self.rotary_emb = rotary if config["no_rope_layers"][index] else None
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
        if self.rotary_emb is not None:
            query, key = self.rotary_emb(
                positions,
                query.view(-1, self.num_heads, self.head_size),
                key.view(-1, self.num_kv_heads, self.head_size),
            )
        output: Tensor = self.o_proj(self.attn(query, key, value))
        return output


class SmolLM3DecoderLayer(LlamaDecoderLayer):
    attention_type = SmolLM3Attention


class SmolLM3ForCausalLM(LlamaForCausalLM):
    layer_type = SmolLM3DecoderLayer
