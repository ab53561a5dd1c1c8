"""The StableLM family: StableLM 3B, StableLM 2 1.6B and 12B.

LayerNorms and gated MLPs, and rotation of the first channels of a head only. In the largest model attention and MLP see
the same normed input ("parallel residual"), and the heads of query and key are normed, each with weights of its own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.attention import Attention
from octavo.config import ModelConfig
from octavo.layers import (
    LayerNorm,
    ParallelLMHead,
    QKVParallelLinear,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightParameter,
)
from octavo.models.llama import LlamaMLP

__all__ = ["StableLmForCausalLM"]


class PerHeadLayerNorm(nn.Module):
    """A LayerNorm of each head, without bias. The checkpoint has a tensor a head: shards 0, 1, …"""

    def __init__(self, num_heads: int, head_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = WeightParameter((num_heads * head_size,), dtype, dict.fromkeys(range(num_heads), head_size))
        self.num_heads = num_heads
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_size] → the same shape."""
        return kernels.layer_norm(x, self.weight.view(self.num_heads, -1), None, self.eps)


class StableLmAttention(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, name: str) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["layer_norm_eps"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.head_size = config["head_dim"]
        self.qkv_proj = QKVParallelLinear(
            hidden_size, self.head_size, self.num_heads, self.num_kv_heads, bias=config["use_qkv_bias"], dtype=dtype
        )
        self.o_proj = RowParallelLinear(self.num_heads * self.head_size, hidden_size, bias=False, dtype=dtype)
        self.q_layernorm = self.k_layernorm = None
        if config["qk_layernorm"]:
            self.q_layernorm = PerHeadLayerNorm(self.num_heads, self.head_size, eps, dtype)
            self.k_layernorm = PerHeadLayerNorm(self.num_kv_heads, self.head_size, eps, dtype)
        self.rotary_emb = rotary
        self.attn = Attention(
            name,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.head_size**-0.5,
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj.forward_split(hidden)
        query = query.view(-1, self.num_heads, self.head_size)
        key = key.view(-1, self.num_kv_heads, self.head_size)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        query, key = self.rotary_emb(positions, query, key)
        output: Tensor = self.o_proj(self.attn(query, key, value))
        return output


class StableLmDecoderLayer(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, name: str) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["layer_norm_eps"]
        self.input_layernorm = LayerNorm(hidden_size, eps, dtype, bias=True)
        self.self_attn = StableLmAttention(config, dtype, rotary, f"{name}.self_attn")
        self.post_attention_layernorm = None
        if not config["use_parallel_residual"]:
            self.post_attention_layernorm = LayerNorm(hidden_size, eps, dtype, bias=True)
        self.mlp = LlamaMLP(config, dtype)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        normed, total = self.input_layernorm(hidden, residual)
        attended = self.self_attn(positions, normed)
        if self.post_attention_layernorm is not None:
            normed, total = self.post_attention_layernorm(attended, total)
        else:
            _, total = kernels.add_to_residual(attended, total)
        return self.mlp(normed), total


class StableLmModel(nn.Module):
    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        hidden_size = config["hidden_size"]
        self.embed_tokens = VocabParallelEmbedding(model_config.vocab_size, hidden_size, dtype)
        rotary = RotaryEmbedding(
            int(config["head_dim"] * config["partial_rotary_factor"]),
            model_config.max_model_len,
            config["rope_theta"],
            config["rope_scaling"],
        )
        self.layers = nn.ModuleList(
            StableLmDecoderLayer(config, dtype, rotary, f"model.layers.{index}")
            for index in range(config["num_hidden_layers"])
        )
        self.norm = LayerNorm(hidden_size, config["layer_norm_eps"], dtype, bias=True)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class StableLmForCausalLM(nn.Module):
    """Attributes:

    packed_modules_mapping: merged module → the checkpoint's modules, in the order of its shards.
    """

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        self.packed_modules_mapping = {
            "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
            "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
            "q_layernorm": {f"q_layernorm.norms.{head}": head for head in range(config["num_attention_heads"])},
            "k_layernorm": {f"k_layernorm.norms.{head}": head for head in range(config["num_key_value_heads"])},
        }
        self.model = StableLmModel(model_config)
        self.lm_head = ParallelLMHead(
            model_config.vocab_size,
            config["hidden_size"],
            dtype,
            tied_to=self.model.embed_tokens if config["tie_word_embeddings"] else None,
        )

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[num_tokens] and [num_tokens] → [num_tokens, hidden_size]."""
        hidden: Tensor = self.model(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] float32."""
        logits: Tensor = self.lm_head(hidden)
        return logits
