"""The Llama family: Llama 2 and 3, SmolLM2, Mistral. Other families are made from its parts.

A decoder layer is attention and a gated MLP, each normed before and added to the residual after. The residual is added
by the next norm: a layer hands on (what its MLP added, residual so far).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention import Attention
from octavo.config import ModelConfig
from octavo.errors import UnsupportedError
from octavo.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    SiluAndMul,
    VocabParallelEmbedding,
)

__all__ = ["LlamaDecoderLayer", "LlamaForCausalLM", "LlamaMLP"]


class LlamaAttention(nn.Module):
    """Args:

    rotary: shared by all layers.
    index: the layer's place in the model.
    """

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
        self.rotary_emb = rotary
        self.attn = Attention(
            f"model.layers.{index}.self_attn",
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.head_size**-0.5,
            sliding_window=config["sliding_window"],
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj.forward_split(hidden)
        query, key = self.rotary_emb(
            positions,
            query.view(-1, self.num_heads, self.head_size),
            key.view(-1, self.num_kv_heads, self.head_size),
        )
        output: Tensor = self.o_proj(self.attn(query, key, value))
        return output


class LlamaMLP(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        hidden_size, inner_size = config["hidden_size"], config["intermediate_size"]
        bias = config["mlp_bias"]
        if config["hidden_act"] not in ("silu", "swish"):  # two names of the same function
            raise UnsupportedError(f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [inner_size, inner_size], bias=bias, dtype=dtype)
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(inner_size, hidden_size, bias=bias, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(hidden)))
        return output


class LlamaDecoderLayer(nn.Module):
    """Families whose layers differ in their attention only say which with ``attention_type``."""

    attention_type: Callable[[dict[str, Any], torch.dtype, RotaryEmbedding, int], nn.Module] = LlamaAttention

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, index: int) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(hidden_size, eps, dtype)
        self.self_attn = self.attention_type(config, dtype, rotary, index)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, dtype)
        self.mlp = LlamaMLP(config, dtype)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class LlamaModel(nn.Module):
    def __init__(self, model_config: ModelConfig, layer_type: type[LlamaDecoderLayer]) -> None:
        super().__init__()
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        hidden_size = config["hidden_size"]
        self.embed_tokens = VocabParallelEmbedding(model_config.vocab_size, hidden_size, dtype)
        rotary = RotaryEmbedding(
            int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)),
            model_config.max_model_len,
            config["rope_theta"],
            config["rope_scaling"],
            config.get("rope_freq_factors"),
        )
        self.layers = nn.ModuleList(
            layer_type(config, dtype, rotary, index) for index in range(config["num_hidden_layers"])
        )
        self.norm = RMSNorm(hidden_size, config["rms_norm_eps"], dtype)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class LlamaForCausalLM(nn.Module):
    """Attributes:

    packed_modules_mapping: merged module → the checkpoint's modules, in the order of its shards.
    layer_type: what the model is made of; families that differ there only say so.
    """

    packed_modules_mapping = {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }
    layer_type: type[LlamaDecoderLayer] = LlamaDecoderLayer

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        self.model = LlamaModel(model_config, self.layer_type)
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
