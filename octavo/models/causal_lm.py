"""What a family's decoder layers stand between: embedding, last norm and head.

The residual stream is one float32 tensor, [num_tokens, hidden_size], from the embedding to the last norm: a layer takes
it, adds what its blocks compute where it is, and returns it. Blocks compute in the model's type.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from octavo.config import ModelConfig
from octavo.layers import ParallelLMHead, RotaryEmbedding, VocabParallelEmbedding

__all__ = ["CausalLM", "rotary_embedding"]


class DecoderModel(nn.Module):
    """Args and attributes: those of CausalLM."""

    def __init__(self, embed_tokens: VocabParallelEmbedding, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        residual: Tensor = self.embed_tokens(input_ids)
        for layer in self.layers:
            residual = layer(positions, residual)
        hidden: Tensor = self.norm(residual)
        return hidden


class CausalLM(nn.Module):
    """Args:

        layers: first to last, each (positions, residual) → residual.
        norm: residual → hidden states in the model's type.
        embedding_scale, logits_scale: factors of the embedding's vectors and of the logits.
        logits_soft_cap: squeezes the scaled logits smoothly into ± this; None: they are left.

    Attributes:
        packed_modules_mapping: merged module → the checkpoint's modules, in the order of its shards.
    """

    packed_modules_mapping = {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }

    def __init__(
        self,
        model_config: ModelConfig,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        *,
        embedding_scale: float = 1.0,
        logits_scale: float = 1.0,
        logits_soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        config, dtype = model_config.hf_config, getattr(torch, model_config.dtype)
        vocab_size, hidden_size = model_config.vocab_size, config["hidden_size"]
        embed_tokens = VocabParallelEmbedding(vocab_size, hidden_size, dtype, scale=embedding_scale)
        self.model = DecoderModel(embed_tokens, layers, norm)
        self.lm_head = ParallelLMHead(
            vocab_size,
            hidden_size,
            dtype,
            tied_to=embed_tokens if config["tie_word_embeddings"] else None,
            scale=logits_scale,
            soft_cap=logits_soft_cap,
        )

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[num_tokens] and [num_tokens] → [num_tokens, hidden_size]."""
        hidden: Tensor = self.model(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] float32."""
        logits: Tensor = self.lm_head(hidden)
        return logits


def rotary_embedding(model_config: ModelConfig) -> RotaryEmbedding:
    """The rotation that the model's config asks for."""
    config = model_config.hf_config
    return RotaryEmbedding(
        int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)),
        model_config.max_model_len,
        config["rope_theta"],
        config["rope_scaling"],
        config.get("rope_freq_factors"),
    )
