"""Gemma 2: soft caps, norms on both sides of each block, every other layer with a sliding window.

What a block adds to the residual is normed too, so a layer has four norms. Their weights are stored as the distance
from 1. The embedding is the head as well, and is scaled by √hidden_size on its way in only.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention import Attention
from octavo.config import ModelConfig
from octavo.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    gated_activation,
)

__all__ = ["Gemma2Attention", "Gemma2DecoderLayer", "Gemma2ForCausalLM"]


def gemma_norm(size: int, config: dict[str, Any], dtype: torch.dtype) -> RMSNorm:
    """A norm whose weights are stored as the distance from 1."""
    return RMSNorm(size, config["rms_norm_eps"], dtype, weight_offset=1.0)


class Gemma2Attention(nn.Module):
    """Args:

    layer_type: ``"sliding_attention"`` or ``"full_attention"``.
    """

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, layer_type: str, name: str
    ) -> None:
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
            scale=config["query_pre_attn_scalar"] ** -0.5,
            sliding_window=config["sliding_window"] if layer_type == "sliding_attention" else None,
            logits_soft_cap=config["attn_logit_softcapping"],
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


class Gemma2MLP(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        hidden_size, inner_size = config["hidden_size"], config["intermediate_size"]
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [inner_size, inner_size], bias=False, dtype=dtype)
        self.act_fn = gated_activation(config["hidden_act"])
        self.down_proj = RowParallelLinear(inner_size, hidden_size, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(hidden)))
        return output


class Gemma2DecoderLayer(nn.Module):
    """Args:

    self_attn: (positions, hidden) → what attention adds.
    """

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, self_attn: nn.Module) -> None:
        super().__init__()
        hidden_size = config["hidden_size"]
        self.input_layernorm = gemma_norm(hidden_size, config, dtype)
        self.self_attn = self_attn
        self.post_attention_layernorm = gemma_norm(hidden_size, config, dtype)
        self.pre_feedforward_layernorm = gemma_norm(hidden_size, config, dtype)
        self.mlp = Gemma2MLP(config, dtype)
        self.post_feedforward_layernorm = gemma_norm(hidden_size, config, dtype)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.post_attention_layernorm.normed(self.self_attn(positions, hidden))
        hidden, residual = self.pre_feedforward_layernorm(hidden, residual)
        return self.post_feedforward_layernorm.normed(self.mlp(hidden)), residual


class Gemma2Model(nn.Module):
    def __init__(self, model_config: ModelConfig, layers: Iterable[Gemma2DecoderLayer]) -> None:
        super().__init__()
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        hidden_size = config["hidden_size"]
        # The model was trained with a factor in the data type of its weights (55.5 for √3072 in bfloat16).
        scale = torch.tensor(hidden_size**0.5, dtype=dtype).item()
        self.embed_tokens = VocabParallelEmbedding(model_config.vocab_size, hidden_size, dtype, scale=scale)
        self.layers = nn.ModuleList(layers)
        self.norm = gemma_norm(hidden_size, config, dtype)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class Gemma2ForCausalLM(nn.Module):
    """Attributes:

    packed_modules_mapping: merged module → the checkpoint's modules, in the order of its shards.
    """

    packed_modules_mapping = {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        self.model = Gemma2Model(model_config, self.make_layers(model_config))
        self.lm_head = ParallelLMHead(
            model_config.vocab_size,
            config["hidden_size"],
            dtype,
            tied_to=self.model.embed_tokens if config["tie_word_embeddings"] else None,
            soft_cap=config["final_logit_softcapping"],
        )

    def make_layers(self, model_config: ModelConfig) -> Iterator[Gemma2DecoderLayer]:
        """The decoder layers, first to last."""
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        rotary = RotaryEmbedding(
            config["head_dim"], model_config.max_model_len, config["rope_theta"], config["rope_scaling"]
        )
        for index, layer_type in enumerate(config["layer_types"]):
            attention = Gemma2Attention(config, dtype, rotary, layer_type, f"model.layers.{index}.self_attn")
            yield Gemma2DecoderLayer(config, dtype, attention)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[num_tokens] and [num_tokens] → [num_tokens, hidden_size]."""
        hidden: Tensor = self.model(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] float32."""
        logits: Tensor = self.lm_head(hidden)
        return logits
