"""The dense models of Granite 4 (350M, 1B, Micro): Granite 3 with one name more.

Hugging Face's class is the one of the hybrid models, in which experts and a shared MLP stand side by side. Without
experts the shared MLP is the MLP; its gate and up projections are one tensor in the checkpoint.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.layers import GatedColumnParallelLinear, RMSNorm, RowParallelLinear
from octavo.models.granite import GraniteForCausalLM
from octavo.models.llama import LlamaAttention

__all__ = ["GraniteMoeHybridForCausalLM"]


class GraniteSharedMLP(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        hidden_size, inner_size = config["hidden_size"], config["shared_intermediate_size"]
        self.input_linear = GatedColumnParallelLinear(
            hidden_size, inner_size, config["hidden_act"], bias=False, dtype=dtype
        )
        self.output_linear = RowParallelLinear(
            inner_size, hidden_size, bias=False, dtype=dtype, residual_multiplier=config["residual_multiplier"]
        )

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.output_linear.add_to(residual, self.input_linear(hidden))


class Granite4DecoderLayer(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, self_attn: LlamaAttention) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(hidden_size, eps, dtype)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, dtype)
        self.shared_mlp = GraniteSharedMLP(config, dtype)

    def forward(self, positions: Tensor, residual: Tensor) -> Tensor:
        residual = self.self_attn(positions, self.input_layernorm(residual), residual)
        output: Tensor = self.shared_mlp(self.post_attention_layernorm(residual), residual)
        return output


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    layer_type = Granite4DecoderLayer
    packed_modules_mapping = {"qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"}}
