"""A GGUF file's metadata and tensor names in Hugging Face terms: what all families share, with what a family adds."""

import math
import re
from typing import Any

from octavo.checkpoints.families import Family, GGUFPart, Placement, gguf_part_of, unpermuted
from octavo.checkpoints.gguf_file import GGUFFile
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry, map_file, shown
from octavo.errors import CheckpointError, UnsupportedError

__all__ = ["gguf_config", "gguf_placements"]

_MAX = 2**31 - 1
_ROPE_FREQS = "rope_freqs.weight"
_LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
# Tensors that are settings rather than weights.
_SETTINGS = (_ROPE_FREQS, *_LONGROPE.values())
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
_OUTER = re.compile(r"([a-z_]+)\.(weight|bias)")
_EPS_KEYS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}

# Metadata that change the arithmetic in some families, and the values that change nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
}


def gguf_config(gguf: GGUFFile) -> dict[str, Any]:
    """config.json as Hugging Face would have it, not yet checked across fields.

    Raises:
        CheckpointError: metadata or the token embedding that are missing or wrong.
        UnsupportedError: another architecture, a split file, or a variant that octavo does not have.
    """
    family, part = _part(gguf)
    fields = _own_fields(gguf, part)
    _check_harmless(fields, part)
    tensors = {tensor.name: tensor for tensor in gguf.tensors}
    vocab_size = _vocab_size(gguf, tensors)
    heads = _per_layer(fields, "attention.head_count")
    hidden_size = fields.integer("embedding_length", 1, _MAX)
    head_dim = _head_dim(fields, hidden_size, heads)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": _per_layer(fields, "feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count", 1, _MAX),
        "num_attention_heads": heads,
        "num_key_value_heads": _per_layer(fields, "attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length", 1, _MAX),
        family.eps_field: fields.number(_EPS_KEYS[family.eps_field], 0.0, 1.0),
        "rope_theta": fields.number("rope.freq_base", 1.0001, 1e12, default=10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    rotary_dim = _rotary_dim(fields, head_dim, family)
    if family.partial_rotary:
        # Rounded up, so that its product with head_dim is not a little less than the whole number.
        config["partial_rotary_factor"] = min(1.0, math.nextafter(rotary_dim / head_dim, 2.0))
    is_longrope = any(name in tensors for name in _LONGROPE.values())
    config["rope_scaling"] = _longrope(fields, gguf, tensors, rotary_dim) if is_longrope else _rope_scaling(fields)
    if _ROPE_FREQS in tensors:
        config["rope_freq_factors"] = _rope_factors(gguf, tensors[_ROPE_FREQS], rotary_dim)
    return config | part.config(fields, tensors)


def gguf_placements(gguf: GGUFFile, config: dict[str, Any]) -> list[tuple[TensorEntry, Placement]]:
    """The tensors that a model loads and what they are to it, in the file's order."""
    _, part = _part(gguf)
    return [(entry, _placement(entry, gguf, part, config)) for entry in gguf.tensors if entry.name not in _SETTINGS]


def _part(gguf: GGUFFile) -> tuple[Family, GGUFPart]:
    fields = Fields(gguf.metadata, gguf.path)
    found = gguf_part_of(fields.string("general.architecture"), gguf.path)
    if fields.integer("split.count", 0, 65535, default=1) > 1:
        raise UnsupportedError(f"{gguf.path}: one part of a split GGUF; merge the parts into one file first")
    return found


def _own_fields(gguf: GGUFFile, part: GGUFPart) -> Fields:
    """The architecture's own metadata, without its prefix."""
    prefix = part.architecture + "."
    own = {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}
    return Fields(own, gguf.path, prefix)


def _check_harmless(fields: Fields, part: GGUFPart) -> None:
    for key, harmless in _HARMLESS.items():
        value = fields.values.get(key)
        if value is not None and value not in harmless and key not in part.reads:
            raise UnsupportedError(f"{fields.file}: {fields.where}{key} = {shown(value)} is not supported yet")


def _vocab_size(gguf: GGUFFile, tensors: dict[str, TensorEntry]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("missing, or not a matrix", file=str(gguf.path), tensor="token_embd.weight")
    vocab_size = embedding.shape[0]
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise CheckpointError(
            f"{vocab_size} rows, fewer than the {len(tokens)} entries of tokenizer.ggml.tokens",
            file=str(gguf.path),
            tensor="token_embd.weight",
        )
    return vocab_size


def _placement(entry: TensorEntry, gguf: GGUFFile, part: GGUFPart, config: dict[str, Any]) -> Placement:
    stored, name = _hf_name(entry, gguf, part, config)
    offset = part.norm_offset if stored.endswith("norm") and entry.name.endswith(".weight") else 0.0
    if stored not in part.permuted:
        return Placement(name, offset=offset, flat=stored in part.flattened)
    heads, head_dim = config[part.permuted[stored]], config["head_dim"]
    if entry.shape[0] != heads * head_dim:
        raise CheckpointError(
            f"{entry.shape[0]} rows, {heads} heads of {head_dim} are expected", file=str(gguf.path), tensor=entry.name
        )
    return Placement(name, unpermuted(heads, head_dim), offset)


def _hf_name(entry: TensorEntry, gguf: GGUFFile, part: GGUFPart, config: dict[str, Any]) -> tuple[str, str]:
    """(the file's name for the part, the Hugging Face name)."""
    outer = _OUTER.fullmatch(entry.name)
    if outer and outer[1] in part.outer_names:
        return outer[1], f"{part.outer_names[outer[1]]}.{outer[2]}"
    block = _BLOCK.fullmatch(entry.name)
    if block is None or block[2] not in part.block_names:
        raise UnsupportedError(
            f"{gguf.path}: tensor {entry.name!r} belongs to no {part.architecture} model that octavo knows"
        )
    layer = int(block[1])
    if layer >= config["num_hidden_layers"]:
        raise CheckpointError(
            f"layer {layer} of a model of {config['num_hidden_layers']} ({part.architecture}.block_count)",
            file=str(gguf.path),
            tensor=entry.name,
        )
    return block[2], f"{part.layers}.{layer}.{part.block_names[block[2]]}.{block[3]}"


def _per_layer(fields: Fields, key: str, default: int | None = None) -> int:
    """A number that newer files may state for each layer; octavo's families have the same everywhere."""
    value = fields.values.get(key)
    if isinstance(value, list) and value:
        if any(item != value[0] for item in value):
            raise UnsupportedError(
                f"{fields.file}: {fields.where}{key}: different values in different layers are not supported yet"
            )
        fields = Fields({key: value[0]}, fields.file, fields.where)
    found: int = fields.integer(key, 1, _MAX) if default is None else fields.integer(key, 1, _MAX, default=default)
    return found


def _head_dim(fields: Fields, hidden_size: int, heads: int) -> int:
    head_dim: int = fields.integer("attention.key_length", 2, _MAX, default=hidden_size // heads)
    _check_head_length(fields, "attention.value_length", head_dim)
    return head_dim


def _rotary_dim(fields: Fields, head_dim: int, family: Family) -> int:
    if family.partial_rotary:
        rotary_dim: int = fields.integer("rope.dimension_count", 2, head_dim, default=head_dim)
        return rotary_dim
    _check_head_length(fields, "rope.dimension_count", head_dim)
    return head_dim


def _check_head_length(fields: Fields, key: str, head_dim: int) -> None:
    if fields.integer(key, 1, _MAX, default=head_dim) != head_dim:
        raise UnsupportedError(
            f"{fields.file}: {fields.where}{key} {fields.values[key]} is not the head's length {head_dim}, which is "
            "not supported yet"
        )


def _rope_scaling(fields: Fields) -> dict[str, Any] | None:
    prefix = "rope.scaling."
    kind = fields.string(prefix + "type", default="none")
    factor = fields.number(prefix + "factor", 0.0, 1e6, default=None)
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(
            f"{fields.file}: {fields.where}{prefix}type {shown(kind)} is not supported yet; "
            "supported: none, linear, yarn"
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


def _longrope(fields: Fields, gguf: GGUFFile, tensors: dict[str, TensorEntry], rotary_dim: int) -> dict[str, Any]:
    """There is no name for it in the metadata: the two tensors of factors say it."""
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length", 1, _MAX),
        "attention_factor": fields.number("rope.scaling.attn_factor", 0.0, 1e6, default=1.0),
    }
    for key, name in _LONGROPE.items():
        if name not in tensors:
            raise CheckpointError("is missing; short and long factors go together", file=str(gguf.path), tensor=name)
        scaling[key] = _rope_factors(gguf, tensors[name], rotary_dim)
    return scaling


def _rope_factors(gguf: GGUFFile, entry: TensorEntry, rotary_dim: int) -> list[float]:
    """What each rotary frequency is divided by."""
    if entry.type.name != "F32" or entry.shape != (rotary_dim // 2,):
        raise CheckpointError(
            f"{rotary_dim // 2} numbers of type F32 are expected, it is {entry.type.name} {list(entry.shape)}",
            file=str(gguf.path),
            tensor=entry.name,
        )
    data = map_file(gguf.path)[entry.offset : entry.offset + entry.num_bytes]
    factors: list[float] = data.view("<f4").tolist()
    if not all(0.0 < factor < math.inf for factor in factors):
        raise CheckpointError("a factor that is not a number above 0", file=str(gguf.path), tensor=entry.name)
    return factors
