"""GGUF files of the llama architecture (Llama, Mistral, SmolLM2, …) in Hugging Face terms: config, names, row order.

llama.cpp stores the rows of Q and K so that the two numbers that are rotated together stand next to each other; here
they are put back to where Hugging Face models expect them, half a head apart.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoints.gguf_file import GGUFFile
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry, map_file, shown
from octavo.errors import CheckpointError, UnsupportedError

__all__ = ["LlamaTensor", "llama_config", "llama_tensors", "unpermute_rows"]

_MAX = 2**31 - 1
_ROPE_FREQS = "rope_freqs.weight"

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")

# Metadata of other members of the llama family that change the arithmetic, and the values that change nothing.
_UNSUPPORTED_KEYS: dict[str, tuple[Any, ...]] = {
    "llama.expert_count": (0,),
    "llama.attention.clamp_kqv": (0.0,),
    "llama.attention.scale": (0.0,),
    "llama.attention.causal": (True,),
    "llama.logit_scale": (0.0, 1.0),
    "llama.embedding_scale": (0.0, 1.0),
    "llama.residual_scale": (0.0, 1.0),
    "llama.rope.scaling.yarn_ext_factor": (1.0, -1.0),
}


@dataclass(frozen=True)
class LlamaTensor:
    """Attributes:

    entry: where it lies.
    name: its Hugging Face name.
    permuted_heads: heads whose rows have to be put back, or None.
    """

    entry: TensorEntry
    name: str
    permuted_heads: int | None


def llama_config(gguf: GGUFFile) -> dict[str, Any]:
    """config.json as Hugging Face would have it, not yet checked across fields.

    Raises:
        CheckpointError: metadata or the token embedding that are missing or wrong.
        UnsupportedError: another architecture, a split file, or a variant that octavo does not have.
    """
    fields = Fields(gguf.metadata, gguf.path)
    _check_ours(gguf, fields)
    by_name = {tensor.name: tensor for tensor in gguf.tensors}
    embedding = by_name.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("missing, or not a matrix", file=str(gguf.path), tensor="token_embd.weight")
    vocab_size = embedding.shape[0]
    _check_tokens(gguf, vocab_size)
    heads = _per_layer(fields, "llama.attention.head_count")
    hidden_size = fields.integer("llama.embedding_length", 1, _MAX)
    sliding_window = fields.integer("llama.attention.sliding_window", 0, _MAX, default=0) or None
    config = {
        "architectures": ["MistralForCausalLM" if sliding_window else "LlamaForCausalLM"],
        "model_type": "mistral" if sliding_window else "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": _per_layer(fields, "llama.feed_forward_length"),
        "num_hidden_layers": fields.integer("llama.block_count", 1, _MAX),
        "num_attention_heads": heads,
        "num_key_value_heads": _per_layer(fields, "llama.attention.head_count_kv", default=heads),
        "head_dim": _head_dim(fields, hidden_size, heads),
        "max_position_embeddings": fields.integer("llama.context_length", 1, _MAX),
        "rms_norm_eps": fields.number("llama.attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "rope_theta": fields.number("llama.rope.freq_base", 1.0001, 1e12, default=10000.0),
        "rope_scaling": _rope_scaling(fields),
        "sliding_window": sliding_window,
        "tie_word_embeddings": "output.weight" not in by_name,
        "attention_bias": "blk.0.attn_q.bias" in by_name,
        "mlp_bias": "blk.0.ffn_gate.bias" in by_name,
    }
    if _ROPE_FREQS in by_name:
        config["rope_freq_factors"] = _rope_freq_factors(gguf, by_name[_ROPE_FREQS], config["head_dim"])
    return config


def llama_tensors(gguf: GGUFFile, config: dict[str, Any]) -> list[LlamaTensor]:
    """The tensors that a model loads, under their Hugging Face names, in the file's order."""
    found = []
    for entry in gguf.tensors:
        if entry.name == _ROPE_FREQS:
            continue
        name, part = _hf_name(entry, config["num_hidden_layers"], gguf)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(part)
        if heads is not None and entry.shape[0] != heads * config["head_dim"]:
            raise CheckpointError(
                f"{entry.shape[0]} rows, {heads} heads of {config['head_dim']} are expected",
                file=str(gguf.path),
                tensor=entry.name,
            )
        found.append(LlamaTensor(entry, name, heads))
    return found


def unpermute_rows(data: npt.NDArray[np.uint8], heads: int, rows: int) -> npt.NDArray[np.uint8]:
    """Bytes of a Q or K matrix (or bias) with its rows in Hugging Face order, copied.

    Args:
        data: all rows, one after another, quantized or not: no row shares a block with another.
        heads: attention heads in it.
        rows: heads × head_dim.
    """
    pairs = data.reshape(heads, rows // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def _hf_name(entry: TensorEntry, num_layers: int, gguf: GGUFFile) -> tuple[str, str]:
    """(Hugging Face name, the part of a block that it belongs to or "")."""
    if entry.name in _OUTER_NAMES:
        return _OUTER_NAMES[entry.name], ""
    match = _BLOCK.fullmatch(entry.name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise UnsupportedError(f"{gguf.path}: tensor {entry.name!r} belongs to no Llama model that octavo knows")
    layer = int(match[1])
    if layer >= num_layers:
        raise CheckpointError(
            f"layer {layer} of a model of {num_layers} (llama.block_count)", file=str(gguf.path), tensor=entry.name
        )
    return f"model.layers.{layer}.{_BLOCK_NAMES[match[2]]}.{match[3]}", match[2]


def _check_ours(gguf: GGUFFile, fields: Fields) -> None:
    architecture = fields.string("general.architecture")
    if architecture != "llama":
        raise UnsupportedError(
            f"{gguf.path}: GGUF architecture {shown(architecture)} is not supported yet; supported: llama"
        )
    if fields.integer("split.count", 0, 65535, default=1) > 1:
        raise UnsupportedError(f"{gguf.path}: one part of a split GGUF; merge the parts into one file first")
    for key, harmless in _UNSUPPORTED_KEYS.items():
        value = gguf.metadata.get(key)
        if value is not None and value not in harmless:
            raise UnsupportedError(f"{gguf.path}: {key} = {shown(value)} is not supported yet")


def _check_tokens(gguf: GGUFFile, vocab_size: int) -> None:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise CheckpointError(
            f"{vocab_size} rows, fewer than the {len(tokens)} entries of tokenizer.ggml.tokens",
            file=str(gguf.path),
            tensor="token_embd.weight",
        )


def _per_layer(fields: Fields, key: str, default: int | None = None) -> int:
    """A number that newer files may state for each layer; octavo's Llama has the same everywhere."""
    value = fields.values.get(key)
    if isinstance(value, list) and value:
        if any(item != value[0] for item in value):
            raise UnsupportedError(f"{fields.file}: {key}: different values in different layers are not supported yet")
        fields = Fields({key: value[0]}, fields.file)
    found: int = fields.integer(key, 1, _MAX) if default is None else fields.integer(key, 1, _MAX, default=default)
    return found


def _head_dim(fields: Fields, hidden_size: int, heads: int) -> int:
    head_dim: int = fields.integer("llama.attention.key_length", 2, _MAX, default=hidden_size // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.integer(key, 1, _MAX, default=head_dim) != head_dim:
            raise UnsupportedError(
                f"{fields.file}: {key} {fields.values[key]} is not the head's length {head_dim}, which is not "
                "supported yet"
            )
    return head_dim


def _rope_scaling(fields: Fields) -> dict[str, Any] | None:
    prefix = "llama.rope.scaling."
    kind = fields.string(prefix + "type", default="none")
    factor = fields.number(prefix + "factor", 0.0, 1e6, default=None)
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(
            f"{fields.file}: {prefix}type {shown(kind)} is not supported yet; supported: none, linear, yarn"
        )
    if not factor:
        raise fields.wrong(prefix + "factor", "a number above 0")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.integer(prefix + "original_context_length", 1, _MAX),
        "beta_fast": fields.number(prefix + "yarn_beta_fast", 0.0, 1e6, default=None),
        "beta_slow": fields.number(prefix + "yarn_beta_slow", 0.0, 1e6, default=None),
    }
    # llama.cpp multiplies yarn's own attention factor, Hugging Face replaces it.
    for key in ("attn_factor", "yarn_attn_factor"):
        times = fields.number(prefix + key, 0.0, 1e6, default=None)
        if times:
            scaling["attention_factor"] = times * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return scaling


def _rope_freq_factors(gguf: GGUFFile, entry: TensorEntry, head_dim: int) -> list[float]:
    """What each rotary frequency is divided by (the llama3 scaling, written out)."""
    if entry.type.name != "F32" or entry.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{head_dim // 2} numbers of type F32 are expected, it is {entry.type.name} {list(entry.shape)}",
            file=str(gguf.path),
            tensor=entry.name,
        )
    data = map_file(gguf.path)[entry.offset : entry.offset + entry.num_bytes]
    factors: list[float] = data.view("<f4").tolist()
    if not all(0.0 < factor < math.inf for factor in factors):
        raise CheckpointError("a factor that is not a number above 0", file=str(gguf.path), tensor=entry.name)
    return factors
