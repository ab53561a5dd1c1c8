"""Checkpoints made for the tests: tiny Llama models as safetensors folders and as GGUF files.

GGUF files are written by the `gguf` package, safetensors by theirs: independent of the readers under test.
"""

import json
import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from octavo.checkpoints import iterate_tensors, read_model_facts
from octavo.errors import ModelError

Weights = dict[str, npt.NDArray[Any]]

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 64, 96, 4, 2, 16, 2, 128

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 256,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INTERMEDIATE,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": [f"token {index}" for index in range(VOCABULARY)],
    "tokenizer.ggml.token_type": [1] * VOCABULARY,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}

# Hugging Face module → GGUF's name for it, in a layer.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def llama_weights(tied: bool = True) -> Weights:
    """Random float32 weights under their Hugging Face names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    module, _, kind = name.rpartition(".")
    if module in OUTER_NAMES:
        return f"{OUTER_NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def interleaved(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows as llama.cpp keeps Q and K, written row by row: pair p of a head goes to rows 2p and 2p + 1."""
    head_dim = len(rows) // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for pair in range(head_dim // 2):
            out[head * head_dim + 2 * pair] = rows[head * head_dim + pair]
            out[head * head_dim + 2 * pair + 1] = rows[head * head_dim + head_dim // 2 + pair]
    return out


def write_gguf(
    path: Path,
    weights: Weights,
    quantization: gguf.GGMLQuantizationType,
    metadata: dict[str, Any],
    extra: Weights,
    arch: str = "llama",
) -> Path:
    """A file of the `gguf` package's making: matrices quantized, vectors in float32."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, weight in weights.items():
        heads = HEADS if ".q_proj." in name else KV_HEADS if ".k_proj." in name else None
        stored = weight if heads is None else interleaved(weight, heads)
        if stored.ndim == 1:
            writer.add_tensor(gguf_name(name), stored)
        else:
            data = gguf.quants.quantize(stored, quantization)
            writer.add_tensor(gguf_name(name), data, raw_dtype=quantization)
    for name, array in extra.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        add = writer.add_int32 if value < 0 else writer.add_uint32 if value < 2**32 else writer.add_uint64
        add(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def load_guarded() -> Callable[[Path], ModelError | None]:
    """Reads a checkpoint from end to end: returns the ModelError that it ended with; insists that nothing else is
    raised, that the message is one short line, and that little memory was used."""

    def load(path: Path) -> ModelError | None:
        found: ModelError | None = None
        tracemalloc.start()
        try:
            read_model_facts(path)
            for tensor in iterate_tensors(path):
                tensor.to_float32()
        except ModelError as error:
            found = error
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 16 * 2**20
        if found is not None:
            assert "\n" not in str(found)
            assert len(str(found)) < 1500
        return found

    return load


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """``said()``: what has been logged so far."""
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    caplog.set_level(logging.INFO, "octavo")
    return lambda: caplog.text


@pytest.fixture
def weights() -> Weights:
    return llama_weights()


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """``make_gguf(quantization="F32", tied=True, extra={}, arch="llama", **metadata)`` → path. A metadata value of
    None leaves the key out; dots in keys are written as double underscores."""

    def make(
        quantization: str = "F32",
        tied: bool = True,
        extra: Weights | None = None,
        arch: str = "llama",
        weights: Weights | None = None,
        **metadata: Any,
    ) -> Path:
        stated = METADATA | {key.replace("__", "."): value for key, value in metadata.items()}
        return write_gguf(
            tmp_path / "model.gguf",
            llama_weights(tied) if weights is None else weights,
            gguf.GGMLQuantizationType[quantization],
            {key: value for key, value in stated.items() if value is not None},
            extra or {},
            arch,
        )

    return make


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """``make_folder(weights=…, shards=1, generation_config=None, **config)`` → folder in Hugging Face form. A config
    value of ``...`` leaves the field out."""

    def make(
        weights: Weights | None = None,
        shards: int = 1,
        generation_config: dict[str, Any] | None = None,
        **config: Any,
    ) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        fields = {key: value for key, value in (CONFIG | config).items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(fields))
        if generation_config is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation_config))
        _write_safetensors(folder, llama_weights() if weights is None else weights, shards)
        return folder

    return make


@pytest.fixture
def make_quantized(make_folder: Callable[..., Path], weights: Weights) -> Callable[..., Path]:
    """``make_quantized({module: {suffix: tensor}}, quantization_config, more={})`` → folder in which these modules have
    these tensors in place of their weights. Settings of ``...`` or None leave the field out."""

    def write(
        modules: dict[str, dict[str, torch.Tensor]],
        settings: dict[str, Any] | None,
        more: dict[str, torch.Tensor] | None = None,
    ) -> Path:
        stated = ... if settings is None else settings
        folder = make_folder(quantization_config=stated, torch_dtype="bfloat16")
        tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
        for module, parts in modules.items():
            del tensors[f"{module}.weight"]
            tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        safetensors.torch.save_file(tensors | (more or {}), folder / "model.safetensors")
        return folder

    return write


def _write_safetensors(folder: Path, weights: Weights, shards: int) -> None:
    if shards == 1:
        safetensors.numpy.save_file(weights, folder / "model.safetensors")
        return
    names = sorted(weights)
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        safetensors.numpy.save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
