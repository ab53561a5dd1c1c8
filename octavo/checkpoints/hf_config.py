"""config.json: is the architecture ours, are its fields sound, is it quantized. One normal form comes out.

The same checks serve GGUF, whose metadata are translated to these fields first.
"""

from pathlib import Path
from typing import Any

from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.rope_config import normal_rope
from octavo.checkpoints.tensor_entry import shown
from octavo.checkpoints.tensor_types import READABLE_TYPES
from octavo.errors import CheckpointError, UnsupportedError
from octavo.logging import init_logger

__all__ = ["ARCHITECTURES", "SUPPORTED_WEIGHTS", "normal_config", "stated_dtype", "token_ids"]

logger = init_logger(__name__)

SUPPORTED_WEIGHTS = f"supported: safetensors of F32, F16 or BF16, and GGUF of {', '.join(READABLE_TYPES)}"

# Architecture → (its model_type, values of fields that its config.json leaves out).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {"max_position_embeddings": 2048}),
    "MistralForCausalLM": (
        "mistral",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
}

# Largest values taken for a model rather than for damage.
_MAX_WIDTH = 1 << 20
_MAX_INTERMEDIATE = 1 << 24
_MAX_HEADS = 1 << 14
_MAX_HEAD_DIM = 1 << 13
_MAX_LAYERS = 1 << 12
_MAX_VOCABULARY = 1 << 24
_MAX_POSITIONS = 2**31 - 1

_DTYPES = ("float32", "bfloat16", "float16")


def normal_config(config: dict[str, Any], file: Path) -> tuple[str, dict[str, Any]]:
    """(architecture, config) with every field that a model reads present, checked, and in its old spelling
    (``rope_theta`` and ``rope_scaling``).

    Raises:
        CheckpointError: a field that is missing, of the wrong type or out of range.
        UnsupportedError: an architecture, quantization or variant that octavo does not have.
    """
    architecture = _architecture(config, file)
    _check_not_quantized(config, file)
    defaults = ARCHITECTURES[architecture][1]
    # A default stands for a field that is not there; null is a value (no sliding window).
    fields = Fields(defaults | config, file)
    found = {
        "vocab_size": fields.integer("vocab_size", 1, _MAX_VOCABULARY),
        "hidden_size": fields.integer("hidden_size", 1, _MAX_WIDTH),
        "intermediate_size": fields.integer("intermediate_size", 1, _MAX_INTERMEDIATE),
        "num_hidden_layers": fields.integer("num_hidden_layers", 1, _MAX_LAYERS),
        "max_position_embeddings": fields.integer("max_position_embeddings", 1, _MAX_POSITIONS),
        "rms_norm_eps": fields.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
        "hidden_act": fields.string("hidden_act", default="silu"),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "attention_bias": fields.boolean("attention_bias", default=False),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "sliding_window": None,
    }
    found |= _heads(fields, found["hidden_size"])
    if found["hidden_act"] not in ("silu", "swish"):
        raise UnsupportedError(f"{file}: hidden_act {shown(found['hidden_act'])} is not supported; supported: silu")
    if architecture == "MistralForCausalLM":
        found["sliding_window"] = fields.integer("sliding_window", 1, _MAX_POSITIONS, default=None)
    _check_layer_types(config, file)
    theta, scaling = normal_rope(config, file, found["max_position_embeddings"])
    found |= {"rope_theta": theta, "rope_scaling": scaling}
    return architecture, {key: value for key, value in config.items() if key != "rope_parameters"} | found


def _heads(fields: Fields, hidden_size: int) -> dict[str, int]:
    heads = fields.integer("num_attention_heads", 1, _MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", 1, _MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}")
    head_dim = fields.integer("head_dim", 2, _MAX_HEAD_DIM, default=None)
    if head_dim is None:
        if hidden_size % heads:
            raise fields.wrong(
                "num_attention_heads", f"a divisor of hidden_size, which is {hidden_size}, where head_dim is not stated"
            )
        head_dim = hidden_size // heads
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        raise fields.wrong("head_dim", f"an even number up to {_MAX_HEAD_DIM}; it comes to {head_dim}")
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def _architecture(config: dict[str, Any], file: Path) -> str:
    supported = f"supported: {', '.join(ARCHITECTURES)}"
    stated = config.get("architectures")
    if stated is not None and not (isinstance(stated, list) and all(isinstance(name, str) for name in stated)):
        raise CheckpointError(f"architectures must be a list of names, got {shown(stated)}", file=str(file))
    if not stated:
        kind: str = Fields(config, file).string("model_type")
        stated = [name for name, (model_type, _) in ARCHITECTURES.items() if model_type == kind]
        if not stated:
            raise UnsupportedError(f"{file}: model_type {shown(kind)} is not supported; {supported}")
    known = [name for name in stated if name in ARCHITECTURES]
    if not known:
        own_code = "; octavo does not run code from checkpoints (auto_map)" if config.get("auto_map") else ""
        raise UnsupportedError(f"{file}: architecture {shown(stated[0])} is not supported; {supported}{own_code}")
    if config.get("auto_map"):
        logger.info("%s: auto_map is not followed: octavo runs its own %s, no code from checkpoints", file, known[0])
    return str(known[0])


def _check_not_quantized(config: dict[str, Any], file: Path) -> None:
    for key in ("quantization_config", "compression_config"):
        settings = config.get(key)
        if not settings:
            continue
        method = settings.get("quant_method", settings.get("format")) if isinstance(settings, dict) else settings
        raise UnsupportedError(f"{file}: {key}: {shown(method)} is not supported yet; {SUPPORTED_WEIGHTS}")


def _check_layer_types(config: dict[str, Any], file: Path) -> None:
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and any(kind != kinds[0] for kind in kinds):
        raise UnsupportedError(f"{file}: layer_types: layers of different kinds are not supported yet")


def stated_dtype(config: dict[str, Any], file: Path) -> str | None:
    """The data type that config.json names, if it names one."""
    fields = Fields(config, file)
    stated = fields.string("dtype", default=fields.string("torch_dtype", default=None))
    if stated is None:
        return None
    name = str(stated).removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedError(f"{file}: dtype {shown(stated)} is not supported; supported: {', '.join(_DTYPES)}")
    return name


def token_ids(value: Any, vocab_size: int, file: Path, key: str) -> list[int]:
    """A field that holds no, one or several token ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise CheckpointError(
                f"{key} must be token ids from 0 to {vocab_size - 1}, got {shown(value)}", file=str(file)
            )
    return list(ids)
