"""OLMo 2: norms after the blocks only, and Q and K normed over all their heads together.

Attention and MLP see the residual stream as it is; what they add to it is normed. As elsewhere a layer hands on (what
its MLP adds, residual so far), and the next one adds.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo import kernels
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

__all__ = ["Olmo2ForCausalLM"]


class Olmo2Attention(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, name: str) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.head_size = config["head_dim"]
        bias = config["attention_bias"]
        self.qkv_proj = QKVParallelLinear(
            hidden_size, self.head_size, self.num_heads, self.num_kv_heads, bias=bias, dtype=dtype
        )
        self.q_norm = RMSNorm(self.qkv_proj.q_size, eps, dtype)
        self.k_norm = RMSNorm(self.qkv_proj.kv_size, eps, dtype)
        self.o_proj = RowParallelLinear(self.num_heads * self.head_size, hidden_size, bias=bias, dtype=dtype)
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
        query, key = self.rotary_emb(
            positions,
            self.q_norm.normed(query).view(-1, self.num_heads, self.head_size),
            self.k_norm.normed(key).view(-1, self.num_kv_heads, self.head_size),
        )
        output: Tensor = self.o_proj(self.attn(query, key, value))
        return output


class Olmo2DecoderLayer(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, name: str) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = Olmo2Attention(config, dtype, rotary, f"{name}.self_attn")
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, dtype)
        self.mlp = LlamaMLP(config, dtype)
        self.post_feedforward_layernorm = RMSNorm(hidden_size, eps, dtype)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden.float()
        else:
            hidden, residual = kernels.add_to_residual(hidden, residual)
        hidden = self.post_attention_layernorm.normed(self.self_attn(positions, hidden))
        hidden, residual = kernels.add_to_residual(hidden, residual)
        return self.post_feedforward_layernorm.normed(self.mlp(hidden)), residual


class Olmo2Model(nn.Module):
    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        hidden_size = config["hidden_size"]
        self.embed_tokens = VocabParallelEmbedding(model_config.vocab_size, hidden_size, dtype)
        rotary = RotaryEmbedding(
            config["head_dim"], model_config.max_model_len, config["rope_theta"], config["rope_scaling"]
        )
        self.layers = nn.ModuleList(
            Olmo2DecoderLayer(config, dtype, rotary, f"model.layers.{index}")
            for index in range(config["num_hidden_layers"])
        )
        self.norm = RMSNorm(hidden_size, config["rms_norm_eps"], dtype)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class Olmo2ForCausalLM(nn.Module):
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
        self.model = Olmo2Model(model_config)
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
