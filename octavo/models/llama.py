"""The Llama family: Llama 2 and 3, SmolLM2, Mistral. Other families are made from its parts.

A decoder layer is attention and a gated MLP, each over the normed residual, and each adds what it computes to the
residual.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention import Attention
from octavo.config import ModelConfig
from octavo.layers import GatedColumnParallelLinear, QKVParallelLinear, RMSNorm, RotaryEmbedding, RowParallelLinear
from octavo.models.causal_lm import CausalLM, rotary_embedding

__all__ = ["LlamaAttention", "LlamaDecoderLayer", "LlamaForCausalLM", "LlamaMLP", "layer_window"]


class LlamaAttention(nn.Module):
    """Args:

    rotary: shared by all layers; None: nothing is rotated.
    index: the layer's place in the model.
    qkv_bias, output_bias: whether the projections have biases; None: what the config says of both.
    scale: of the scores; None: 1 / √head_size.
    sliding_window, logits_soft_cap: see Attention.
    q_norm, k_norm: of query and key before they are rotated: [num_tokens, heads, head_size] → as many numbers.
    residual_multiplier: factor of what is added to the residual.
    """

    def __init__(
        self,
        config: dict[str, Any],
        dtype: torch.dtype,
        rotary: RotaryEmbedding | None,
        index: int,
        *,
        qkv_bias: bool | None = None,
        output_bias: bool | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        residual_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        hidden_size, head_size = config["hidden_size"], config["head_dim"]
        num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            head_size,
            num_heads,
            num_kv_heads,
            bias=config["attention_bias"] if qkv_bias is None else qkv_bias,
            dtype=dtype,
        )
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.rotary_emb = rotary
        self.attn = Attention(
            f"model.layers.{index}.self_attn",
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5 if scale is None else scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
        )
        self.o_proj = RowParallelLinear(
            num_heads * head_size,
            hidden_size,
            bias=config["attention_bias"] if output_bias is None else output_bias,
            dtype=dtype,
            residual_multiplier=residual_multiplier,
        )

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """residual + what attention computes, in float32; without a residual that alone, in the model's type."""
        query, key, value = self.qkv_proj.forward_split(hidden)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cos_sin = None if self.rotary_emb is None else self.rotary_emb.cos_sin
        attended = self.attn(query, key, value, positions, cos_sin)
        output: Tensor = self.o_proj(attended) if residual is None else self.o_proj.add_to(residual, attended)
        return output


class LlamaMLP(nn.Module):
    """Args:

    residual_multiplier: factor of what is added to the residual.
    """

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, *, residual_multiplier: float = 1.0) -> None:
        super().__init__()
        hidden_size, inner_size = config["hidden_size"], config["intermediate_size"]
        bias = config.get("mlp_bias", False)
        self.gate_up_proj = GatedColumnParallelLinear(
            hidden_size, inner_size, config["hidden_act"], bias=bias, dtype=dtype
        )
        self.down_proj = RowParallelLinear(
            inner_size, hidden_size, bias=bias, dtype=dtype, residual_multiplier=residual_multiplier
        )

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """residual + what the MLP computes, in float32; without a residual that alone, in the model's type."""
        inner = self.gate_up_proj(hidden)
        output: Tensor = self.down_proj(inner) if residual is None else self.down_proj.add_to(residual, inner)
        return output


class LlamaDecoderLayer(nn.Module):
    """Args:

    residual_multiplier: factor of what the MLP adds to the residual.
    """

    def __init__(
        self,
        config: dict[str, Any],
        dtype: torch.dtype,
        self_attn: LlamaAttention,
        *,
        residual_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(hidden_size, eps, dtype)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, dtype)
        self.mlp = LlamaMLP(config, dtype, residual_multiplier=residual_multiplier)

    def forward(self, positions: Tensor, residual: Tensor) -> Tensor:
        residual = self.self_attn(positions, self.input_layernorm(residual), residual)
        output: Tensor = self.mlp(self.post_attention_layernorm(residual), residual)
        return output


class LlamaForCausalLM(CausalLM):
    def __init__(self, model_config: ModelConfig) -> None:
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        rotary = rotary_embedding(model_config)
        layers = []
        for index in range(config["num_hidden_layers"]):
            attention = LlamaAttention(config, dtype, rotary, index, sliding_window=config["sliding_window"])
            layers.append(LlamaDecoderLayer(config, dtype, attention))
        super().__init__(model_config, layers, RMSNorm(config["hidden_size"], config["rms_norm_eps"], dtype))


def layer_window(config: dict[str, Any], index: int) -> int | None:
    """The layer's sliding window, in families whose layers are not all of one kind."""
    window: int | None = config["sliding_window"] if config["layer_types"][index] == "sliding_attention" else None
    return window
