"""Rotary embedding settings in their old and new spellings, checked and brought into one form.

Only scalings whose tables depend on nothing but the position are read: those can be computed once.
"""

import math
from pathlib import Path
from typing import Any

from octavo.checkpoints.families import Family
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import shown
from octavo.errors import CheckpointError, UnsupportedError
from octavo.logging import init_logger

__all__ = ["normal_rope"]

logger = init_logger(__name__)

_MAX_POSITIONS = 2**31 - 1
_MAX_FACTOR = 1e6
# What may stand beside a scaling's own fields.
_BESIDE_SCALING = {"type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "factor"}


def normal_rope(config: dict[str, Any], file: Path, found: dict[str, Any], family: Family) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling`` and, for a family that has it, ``partial_rotary_factor``.

    The scaling is None, or a dict with ``rope_type`` (``"linear"``, ``"llama3"``, ``"longrope"`` or ``"yarn"``) and
    all the numbers that the type needs.

    Args:
        found: the common fields, checked.

    Raises:
        CheckpointError: a field that is missing or out of range.
        UnsupportedError: a type that octavo does not compute.
    """
    fields = Fields(config, file)
    # transformers 5 writes rope_parameters; older ones rope_theta and, where there is one, rope_scaling.
    old, new = (fields.nested(key) or Fields({}, file) for key in ("rope_scaling", "rope_parameters"))
    scaling = old if old.values else new
    theta = family.defaults.get("rope_theta", 10000.0)
    share = family.defaults.get("partial_rotary_factor", 1.0)
    for place in (new, fields, scaling):
        theta = place.number("rope_theta", 1.0001, 1e12, default=theta)
        share = place.number("partial_rotary_factor", 0.0, 1.0, default=share)
    settings = {"rope_theta": theta, "rope_scaling": _scaling(fields, scaling, found["max_position_embeddings"])}
    if family.partial_rotary:
        rotary_dim = int(found["head_dim"] * share)
        if rotary_dim < 2 or rotary_dim % 2:
            raise CheckpointError(
                f"partial_rotary_factor {share:g} of heads of {found['head_dim']} is {rotary_dim} channels; an even "
                "number from 2 is expected",
                file=str(file),
            )
        settings["partial_rotary_factor"] = share
    elif share != 1.0:
        raise UnsupportedError(f"{file}: partial_rotary_factor: octavo rotates whole heads of {family.architecture}")
    return settings


def _scaling(fields: Fields, scaling: Fields, max_position_embeddings: int) -> dict[str, Any] | None:
    file = fields.file
    kind = scaling.string("rope_type", default=scaling.string("type", default="default"))
    if kind == "default":
        return None
    if kind == "dynamic":
        raise UnsupportedError(
            f"{file}: {scaling.where}rope_type 'dynamic' changes a token's rotation with the length of the sequence, "
            f"so that cached keys would be wrong; supported: default, {', '.join(_READERS)}"
        )
    if kind not in _READERS:
        raise UnsupportedError(
            f"{file}: {scaling.where}rope_type {shown(kind)} is not supported; supported: "
            f"default, {', '.join(_READERS)}"
        )
    original = fields.integer("original_max_position_embeddings", 1, _MAX_POSITIONS, default=None)
    if original is None:
        original = scaling.integer(
            "original_max_position_embeddings", 1, _MAX_POSITIONS, default=max_position_embeddings
        )
    found = {"rope_type": kind} | _READERS[kind](scaling, original, max_position_embeddings)
    ignored = set(scaling.values) - set(found) - _BESIDE_SCALING
    ignored = {key for key in ignored if scaling.values[key] is not None}
    if ignored:
        name = scaling.where.rstrip(".")
        logger.warning("%s: %s: fields that mean nothing to %s are ignored: %s", file, name, kind, sorted(ignored))
    return found


def _linear(scaling: Fields, original: int, max_position_embeddings: int) -> dict[str, Any]:
    return {"factor": scaling.number("factor", 1e-6, _MAX_FACTOR)}


def _llama3(scaling: Fields, original: int, max_position_embeddings: int) -> dict[str, Any]:
    low = scaling.number("low_freq_factor", 1e-6, _MAX_FACTOR)
    high = scaling.number("high_freq_factor", 1e-6, _MAX_FACTOR)
    if high <= low:
        raise scaling.wrong("high_freq_factor", f"above low_freq_factor, which is {low:g}")
    return {
        "factor": scaling.number("factor", 1e-6, _MAX_FACTOR),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _yarn(scaling: Fields, original: int, max_position_embeddings: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "factor": scaling.number("factor", 1e-6, _MAX_FACTOR, default=max_position_embeddings / original),
        "original_max_position_embeddings": original,
        "beta_fast": scaling.number("beta_fast", 1e-6, _MAX_FACTOR, default=32.0),
        "beta_slow": scaling.number("beta_slow", 1e-6, _MAX_FACTOR, default=1.0),
        "truncate": scaling.boolean("truncate", default=True),
    }
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        value = scaling.number(key, 0.0, _MAX_FACTOR, default=None)
        if value is not None:
            found[key] = value
    return found


def _longrope(scaling: Fields, original: int, max_position_embeddings: int) -> dict[str, Any]:
    """A factor for each rotated pair, in one list for sequences within the original context and one for longer ones."""
    found: dict[str, Any] = {"original_max_position_embeddings": original}
    for key in ("short_factor", "long_factor"):
        factors = scaling.values.get(key)
        if not isinstance(factors, list) or not all(_is_factor(factor) for factor in factors):
            raise scaling.wrong(key, f"a list of numbers above 0 and up to {_MAX_FACTOR:g}")
        found[key] = [float(factor) for factor in factors]
    stretched = scaling.number("factor", 1e-6, _MAX_FACTOR, default=max_position_embeddings / original)
    usual = math.sqrt(1.0 + math.log(stretched) / math.log(original)) if stretched > 1.0 < original else 1.0
    return found | {"attention_factor": scaling.number("attention_factor", 0.0, _MAX_FACTOR, default=usual)}


def _is_factor(value: Any) -> bool:
    return type(value) in (int, float) and 0.0 < value <= _MAX_FACTOR


_READERS = {"linear": _linear, "llama3": _llama3, "longrope": _longrope, "yarn": _yarn}
