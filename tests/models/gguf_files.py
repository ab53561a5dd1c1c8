"""GGUF files of models in Hugging Face form, as llama.cpp's converter writes them, made with the `gguf` package."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from torch import Tensor

__all__ = ["Extra", "ggml_order", "write_gguf"]

# What a family adds: called with the writer and the transformers config.
Extra = Callable[[gguf.GGUFWriter, Any], None]


def ggml_order(weight: Tensor, num_heads: int) -> Tensor:
    """Q and K rows as llama.cpp wants them of a Llama: the two channels of a rotated pair side by side."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(
    folder: Path,
    arch: str,
    *,
    permuted: bool = False,
    norm_offset: float = 0.0,
    norm_eps: bool = True,
    extra: Extra | None = None,
    quantization: str = "F32",
    tensors: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]] = lambda name, weight: [(name, weight)],
    more_tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Writes ``folder / "model.gguf"`` with the weights of ``folder``: matrices quantized, the rest in float32.

    Args:
        arch: llama.cpp's name of the architecture.
        permuted: Q and K rows in `ggml_order`.
        norm_offset: what the converter adds to the weights of norms.
        norm_eps: the RMS norm's epsilon is written, from rms_norm_eps.
        extra: metadata of the family's own.
        tensors: Hugging Face tensor → those that the converter makes of it, still under Hugging Face names.
        more_tensors: tensors that the source does not have, under their GGUF names.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    _add_common(writer, config, norm_eps)
    if extra is not None:
        extra(writer, config)
    (model_arch,) = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]
    names = gguf.get_tensor_name_map(model_arch, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[quantization]
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", None)}
    stored = load_file(folder / "model.safetensors").items()
    for name, weight in (made for source in stored for made in tensors(*source)):
        module = name.split(".")[-2]
        if permuted and module in heads:
            weight = ggml_order(weight, heads[module])
        if module.endswith("norm") and name.endswith(".weight"):
            weight = weight + norm_offset
        data = weight.contiguous().float().numpy()
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        if data.ndim == 1 or quantization == "F32":
            writer.add_tensor(gguf_name, data)
        else:
            writer.add_tensor(gguf_name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    for name, array in (more_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_common(writer: gguf.GGUFWriter, config: Any, norm_eps: bool) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if getattr(config, "num_key_value_heads", None):
        writer.add_head_count_kv(config.num_key_value_heads)
    if norm_eps:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = config.rope_parameters
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    _add_tokenizer(writer, config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A byte-level vocabulary with one merge, padded with words that no text contains."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    tokens += [f"⟨unused{index}⟩" for index in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["t h"])
