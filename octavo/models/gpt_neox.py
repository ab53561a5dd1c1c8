"""The GPT-NeoX family: Pythia, GPT-NeoX-20B, Dolly, RedPajama-INCITE.

LayerNorms, biases everywhere, an MLP without a gate, and rotation of the first channels of a head only. In most models
attention and MLP see the same residual, each through its own norm ("parallel residual"); in some the MLP comes after.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention import Attention
from octavo.config import ModelConfig
from octavo.layers import (
    LayerNorm,
    ParallelLMHead,
    QKVParallelLinear,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    activation,
)
from octavo.models.causal_lm import rotary_embedding

__all__ = ["GPTNeoXForCausalLM"]


class GPTNeoXAttention(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, name: str) -> None:
        super().__init__()
        hidden_size, bias = config["hidden_size"], config["attention_bias"]
        num_heads, head_size = config["num_attention_heads"], config["head_dim"]
        # The checkpoint has query, key and value of a head next to each other; they are put in order when it is read.
        self.query_key_value = QKVParallelLinear(hidden_size, head_size, num_heads, num_heads, bias=bias, dtype=dtype)
        self.rotary_emb = rotary
        self.attn = Attention(
            name, num_heads=num_heads, num_kv_heads=num_heads, head_size=head_size, scale=head_size**-0.5
        )
        self.dense = RowParallelLinear(hidden_size, hidden_size, bias=bias, dtype=dtype)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor) -> Tensor:
        """residual + what attention computes, in float32."""
        query, key, value = self.query_key_value.forward_split(hidden)
        return self.dense.add_to(residual, self.attn(query, key, value, positions, self.rotary_emb.cos_sin))


class GPTNeoXMLP(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        hidden_size, inner_size = config["hidden_size"], config["intermediate_size"]
        self.dense_h_to_4h = RowParallelLinear(hidden_size, inner_size, bias=True, dtype=dtype)
        self.act_fn = activation(config["hidden_act"])
        self.dense_4h_to_h = RowParallelLinear(inner_size, hidden_size, bias=True, dtype=dtype)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """residual + what the MLP computes, in float32."""
        return self.dense_4h_to_h.add_to(residual, self.act_fn(self.dense_h_to_4h(hidden)))


class GPTNeoXLayer(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, name: str) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["layer_norm_eps"]
        self.parallel = config["use_parallel_residual"]
        self.input_layernorm = LayerNorm(hidden_size, eps, dtype, bias=True)
        self.attention = GPTNeoXAttention(config, dtype, rotary, f"{name}.attention")
        self.post_attention_layernorm = LayerNorm(hidden_size, eps, dtype, bias=True)
        self.mlp = GPTNeoXMLP(config, dtype)

    def forward(self, positions: Tensor, residual: Tensor) -> Tensor:
        hidden = self.input_layernorm(residual)
        seen = self.post_attention_layernorm(residual) if self.parallel else None  # before attention adds to it
        residual = self.attention(positions, hidden, residual)
        output: Tensor = self.mlp(self.post_attention_layernorm(residual) if seen is None else seen, residual)
        return output


class GPTNeoXModel(nn.Module):
    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        hidden_size = config["hidden_size"]
        self.embed_in = VocabParallelEmbedding(model_config.vocab_size, hidden_size, dtype)
        rotary = rotary_embedding(model_config)
        self.layers = nn.ModuleList(
            GPTNeoXLayer(config, dtype, rotary, f"gpt_neox.layers.{index}")
            for index in range(config["num_hidden_layers"])
        )
        self.final_layer_norm = LayerNorm(hidden_size, config["layer_norm_eps"], dtype, bias=True)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        residual: Tensor = self.embed_in(input_ids)
        for layer in self.layers:
            residual = layer(positions, residual)
        hidden: Tensor = self.final_layer_norm(residual)
        return hidden


class GPTNeoXForCausalLM(nn.Module):
    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        self.gpt_neox = GPTNeoXModel(model_config)
        self.lm_head = ParallelLMHead(
            model_config.vocab_size,
            config["hidden_size"],
            dtype,
            tied_to=self.gpt_neox.embed_in if config["tie_word_embeddings"] else None,
        )

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[num_tokens] and [num_tokens] → [num_tokens, hidden_size]."""
        hidden: Tensor = self.gpt_neox(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] float32."""
        logits: Tensor = self.lm_head(hidden)
        return logits
