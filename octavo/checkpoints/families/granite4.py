"""The dense models of Granite 4. Their class is that of the hybrid ones: mamba layers and experts are refused by name.

llama.cpp writes the dense models as "granite" (granite.py).
"""

from typing import Any

from octavo.checkpoints.families.family import Family
from octavo.checkpoints.families.granite import DEFAULTS, check_granite
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import shown
from octavo.errors import UnsupportedError

__all__ = ["FAMILY"]

# Two names of the same kind of layer. A config.json that names none means mamba layers only.
_ATTENTION = ("attention", "full_attention")


def _prepare(config: dict[str, Any]) -> dict[str, Any]:
    """Without a type nothing is rotated."""
    found = dict(config)
    if found.get("position_embedding_type") is None:
        found["position_embedding_type"] = "nope"
    return found


def _check(fields: Fields, found: dict[str, Any]) -> dict[str, Any]:
    kinds = fields.values.get("layer_types")
    layers = found["num_hidden_layers"]
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise fields.wrong("layer_types", f"a list of {layers} names, one for each layer")
    other = next((kind for kind in kinds or ["mamba"] if kind not in _ATTENTION), None)
    if other is not None:
        raise UnsupportedError(
            f"{fields.file}: layer_types: layers of kind {shown(other)} are not supported yet; supported: attention"
        )
    experts = fields.integer("num_local_experts", 0, 2**20, default=8)
    if experts:
        raise UnsupportedError(f"{fields.file}: num_local_experts {experts}: experts are not supported yet")
    return check_granite(fields, found) | {
        "layer_types": ["full_attention"] * layers,
        "shared_intermediate_size": fields.integer("shared_intermediate_size", 1, 2**24, default=1024),
    }


FAMILY = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    defaults=DEFAULTS,
    prepare=_prepare,
    check=_check,
)
