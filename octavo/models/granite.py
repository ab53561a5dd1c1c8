"""The Granite family: Granite 3, and the dense models of Granite 4 (see granite4.py).

A Llama with four numbers more: the embedding's vectors, the attention's scores, what a block adds to the residual, and
the logits are each multiplied by one of them. Some models of Granite 4 rotate nothing ("nope").
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention import Attention
from octavo.config import ModelConfig
from octavo.layers import (
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from octavo.models.llama import LlamaMLP

__all__ = ["GraniteAttention", "GraniteDecoderLayer", "GraniteForCausalLM", "GraniteModel", "granite_norm"]

# (config, data type, rotary embedding, name) → a layer.
MakeLayer = Callable[[dict[str, Any], torch.dtype, RotaryEmbedding | None, str], nn.Module]


def granite_norm(config: dict[str, Any], dtype: torch.dtype) -> RMSNorm:
    """A norm that multiplies what it adds to the residual: what the block before it has computed."""
    return RMSNorm(
        config["hidden_size"], config["rms_norm_eps"], dtype, residual_multiplier=config["residual_multiplier"]
    )


class GraniteAttention(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding | None, name: str) -> None:
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
        self.rotary_emb = rotary
        self.attn = Attention(
            name,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=config["attention_multiplier"],
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


class GraniteDecoderLayer(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding | None, name: str) -> None:
        super().__init__()
        self.input_layernorm = granite_norm(config, dtype)
        self.self_attn = GraniteAttention(config, dtype, rotary, f"{name}.self_attn")
        self.post_attention_layernorm = granite_norm(config, dtype)
        self.mlp = LlamaMLP(config, dtype)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class GraniteModel(nn.Module):
    def __init__(self, model_config: ModelConfig, make_layer: MakeLayer) -> None:
        super().__init__()
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        self.embed_tokens = VocabParallelEmbedding(
            model_config.vocab_size, config["hidden_size"], dtype, scale=config["embedding_multiplier"]
        )
        rotary = None
        if config["position_embedding_type"] == "rope":
            rotary = RotaryEmbedding(
                config["head_dim"],
                model_config.max_model_len,
                config["rope_theta"],
                config["rope_scaling"],
                config.get("rope_freq_factors"),
            )
        self.layers = nn.ModuleList(
            make_layer(config, dtype, rotary, f"model.layers.{index}") for index in range(config["num_hidden_layers"])
        )
        self.norm = granite_norm(config, dtype)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class GraniteForCausalLM(nn.Module):
    """Attributes:

    make_layer: what the model is made of.
    packed_modules_mapping: merged module → the checkpoint's modules, in the order of its shards.
    """

    make_layer: MakeLayer = GraniteDecoderLayer

    packed_modules_mapping = {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        self.model = GraniteModel(model_config, self.make_layer)
        self.lm_head = ParallelLMHead(
            model_config.vocab_size,
            config["hidden_size"],
            dtype,
            tied_to=self.model.embed_tokens if config["tie_word_embeddings"] else None,
            scale=1.0 / config["logits_scaling"],
        )

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[num_tokens] and [num_tokens] → [num_tokens, hidden_size]."""
        hidden: Tensor = self.model(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] float32."""
        logits: Tensor = self.lm_head(hidden)
        return logits
