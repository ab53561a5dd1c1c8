"""The dense models of Granite 4 (350M, 1B, Micro): Granite 3 with one name more.

Hugging Face's class is the one of the hybrid models, in which experts and a shared MLP stand side by side. Without
experts the shared MLP is the MLP; its gate and up projections are one tensor in the checkpoint.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.layers import MergedColumnParallelLinear, RotaryEmbedding, RowParallelLinear, gated_activation
from octavo.models.granite import GraniteAttention, GraniteForCausalLM, granite_norm

__all__ = ["GraniteMoeHybridForCausalLM"]


class GraniteSharedMLP(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        hidden_size, inner_size = config["hidden_size"], config["shared_intermediate_size"]
        self.input_linear = MergedColumnParallelLinear(hidden_size, [inner_size, inner_size], bias=False, dtype=dtype)
        self.act_fn = gated_activation(config["hidden_act"])
        self.output_linear = RowParallelLinear(inner_size, hidden_size, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.output_linear(self.act_fn(self.input_linear(hidden)))
        return output


class Granite4DecoderLayer(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rotary: RotaryEmbedding | None, name: str) -> None:
        super().__init__()
        self.input_layernorm = granite_norm(config, dtype)
        self.self_attn = GraniteAttention(config, dtype, rotary, f"{name}.self_attn")
        self.post_attention_layernorm = granite_norm(config, dtype)
        self.shared_mlp = GraniteSharedMLP(config, dtype)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.shared_mlp(hidden), residual


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    make_layer = Granite4DecoderLayer
    packed_modules_mapping = {"qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"}}
