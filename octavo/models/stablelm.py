"""The StableLM family: StableLM 3B, StableLM 2 1.6B and 12B.

LayerNorms and gated MLPs, and rotation of the first channels of a head only. In the largest model attention and MLP see
the same normed input ("parallel residual"), and the heads of query and key are normed, each with weights of its own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.config import ModelConfig
from octavo.layers import LayerNorm, RotaryEmbedding, WeightParameter
from octavo.models.causal_lm import CausalLM, rotary_embedding
from octavo.models.llama import LlamaAttention, LlamaMLP

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


class StableLmAttention(LlamaAttention):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, index: int) -> None:
        q_norm = k_norm = None
        if config["qk_layernorm"]:
            eps, head_size = config["layer_norm_eps"], config["head_dim"]
            q_norm = PerHeadLayerNorm(config["num_attention_heads"], head_size, eps, dtype)
            k_norm = PerHeadLayerNorm(config["num_key_value_heads"], head_size, eps, dtype)
        bias = config["use_qkv_bias"]
        super().__init__(config, dtype, rotary, index, qkv_bias=bias, output_bias=False, q_norm=q_norm, k_norm=k_norm)


class StableLmDecoderLayer(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding, index: int) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["layer_norm_eps"]
        self.input_layernorm = LayerNorm(hidden_size, eps, dtype, bias=True)
        self.self_attn = StableLmAttention(config, dtype, rotary, index)
        self.post_attention_layernorm = None
        if not config["use_parallel_residual"]:
            self.post_attention_layernorm = LayerNorm(hidden_size, eps, dtype, bias=True)
        self.mlp = LlamaMLP(config, dtype)

    def forward(self, positions: Tensor, residual: Tensor) -> Tensor:
        hidden = self.input_layernorm(residual)
        residual = self.self_attn(positions, hidden, residual)
        if self.post_attention_layernorm is not None:
            hidden = self.post_attention_layernorm(residual)
        output: Tensor = self.mlp(hidden, residual)
        return output


class StableLmForCausalLM(CausalLM):
    def __init__(self, model_config: ModelConfig) -> None:
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        rotary = rotary_embedding(model_config)
        layers = [StableLmDecoderLayer(config, dtype, rotary, index) for index in range(config["num_hidden_layers"])]
        norm = LayerNorm(config["hidden_size"], config["layer_norm_eps"], dtype, bias=True)
        super().__init__(model_config, layers, norm)
        self.packed_modules_mapping = CausalLM.packed_modules_mapping | {
            "q_norm": {f"q_layernorm.norms.{head}": head for head in range(config["num_attention_heads"])},
            "k_norm": {f"k_layernorm.norms.{head}": head for head in range(config["num_key_value_heads"])},
        }
