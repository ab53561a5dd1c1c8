"""config.json: is the family ours, are its fields sound. One normal form comes out.

The fields that all families share are checked here, a family's own by the family (families/). The same checks serve
GGUF, whose metadata are translated to these fields first.
"""

from pathlib import Path
from typing import Any

from octavo.checkpoints.families import Family, family_of_config
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.rope_config import normal_rope
from octavo.checkpoints.tensor_entry import shown
from octavo.errors import CheckpointError, UnsupportedError
from octavo.logging import init_logger

__all__ = ["normal_config", "stated_dtype", "token_ids"]

logger = init_logger(__name__)

# Largest values taken for a model rather than for damage.
_MAX_WIDTH = 1 << 20
_MAX_INTERMEDIATE = 1 << 24
_MAX_HEADS = 1 << 14
_MAX_HEAD_DIM = 1 << 13
_MAX_LAYERS = 1 << 12
_MAX_VOCABULARY = 1 << 24
_MAX_POSITIONS = 2**31 - 1

_DTYPES = ("float32", "bfloat16", "float16")


def normal_config(config: dict[str, Any], file: Path) -> tuple[Family, dict[str, Any]]:
    """(family, config) with every field that a model reads present, checked, and in its old spelling
    (``rope_theta`` and ``rope_scaling``).

    Raises:
        CheckpointError: a field that is missing, of the wrong type or out of range.
        UnsupportedError: an architecture or variant that octavo does not have.
    """
    family = family_of_config(config, file)
    if config.get("auto_map"):
        logger.info(
            "%s: auto_map is not followed: octavo runs its own %s, no code from checkpoints", file, family.architecture
        )
    config = family.prepare(config)
    # A default stands for a field that is not there; null is a value (no sliding window).
    fields = Fields({**family.defaults, **config}, file)
    found = {
        "vocab_size": fields.integer("vocab_size", 1, _MAX_VOCABULARY),
        "hidden_size": fields.integer("hidden_size", 1, _MAX_WIDTH),
        "intermediate_size": fields.integer("intermediate_size", 1, _MAX_INTERMEDIATE),
        "num_hidden_layers": fields.integer("num_hidden_layers", 1, _MAX_LAYERS),
        "max_position_embeddings": fields.integer("max_position_embeddings", 1, _MAX_POSITIONS),
        family.eps_field: fields.number(family.eps_field, 0.0, 1.0, default=1e-6),
        "hidden_act": fields.string("hidden_act", default=family.activations[0]),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
    }
    found |= _heads(fields, found["hidden_size"])
    if found["hidden_act"] not in family.activations:
        raise UnsupportedError(
            f"{file}: hidden_act {shown(found['hidden_act'])} is not supported; "
            f"supported: {', '.join(family.activations)}"
        )
    found |= normal_rope(config, file, found, family)
    found |= family.check(fields, found)
    if "layer_types" not in found:
        _check_layers_are_alike(config, file, found.get("sliding_window"))
    return family, {key: value for key, value in config.items() if key != "rope_parameters"} | found


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


def _check_layers_are_alike(config: dict[str, Any], file: Path, sliding_window: int | None) -> None:
    """For families whose layers are all of one kind, with or without a window."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return
    if any(kind != kinds[0] for kind in kinds):
        raise UnsupportedError(f"{file}: layer_types: layers of different kinds are not supported yet")
    if kinds[0] != "full_attention" and sliding_window is None:
        raise UnsupportedError(f"{file}: layer_types: {shown(kinds[0])} is not supported; supported: full_attention")


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
