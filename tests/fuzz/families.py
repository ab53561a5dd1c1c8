"""A tiny model of each family, in Hugging Face form as transformers writes it, and some as GGUF."""

from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

from tests.models.gguf_files import write_gguf

__all__ = ["FAMILIES", "GGUF_FAMILIES", "write_family", "write_family_gguf"]

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
# Class of the configuration → what it has beside the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma2Config": {"head_dim": 16, "query_pre_attn_scalar": 16, **_KINDS},
    "Gemma3TextConfig": {"head_dim": 16, "query_pre_attn_scalar": 16, **_KINDS},
    "GPTNeoXConfig": {"rotary_pct": 0.5},
    "GraniteConfig": {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "MistralConfig": {"sliding_window": 32},
    "Olmo2Config": {},
    "Phi3Config": {},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 16},
    "SmolLM3Config": {},
    "StableLmConfig": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
}


def _add_gemma(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)


# Name of llama.cpp's → (class of the configuration, arguments of write_gguf).
GGUF_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"quantization": "Q8_0"}),
    "gemma3": ("Gemma3TextConfig", {"norm_offset": 1.0, "extra": _add_gemma}),
    "olmo2": ("Olmo2Config", {}),
}


def write_family(folder: Path, config_class: str, vocab_size: int) -> None:
    """config.json and weights."""
    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, config_class)(vocab_size=vocab_size, **(_SIZES | FAMILIES[config_class]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_family_gguf(folder: Path, arch: str, vocab_size: int) -> None:
    """model.gguf, beside what it was made from."""
    config_class, options = GGUF_FAMILIES[arch]
    write_family(folder, config_class, vocab_size)
    write_gguf(folder, arch, **options)
