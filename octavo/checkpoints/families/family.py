"""What a model family is to the checkpoints room: data and small functions, gathered in a frozen `Family`.

Everything that families share (counts, heads, rope, names that stay as they are) is checked elsewhere, once; a family
says only what is its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.checkpoints.families.placement import Placement
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import TensorEntry, shown
from octavo.errors import UnsupportedError

__all__ = ["Family", "GGUFPart", "read_layer_types"]

Config = dict[str, Any]


def _unchanged(config: Config) -> Config:
    return config


def _nothing_more(fields: Fields, found: Config) -> Config:
    return {}


def _same_name(name: str, config: Config) -> Placement | None:
    return Placement(name)


def _no_more_metadata(fields: Fields, tensors: Mapping[str, TensorEntry]) -> Config:
    return {}


@dataclass(frozen=True)
class GGUFPart:
    """How llama.cpp writes the family.

    Attributes:
        architecture: general.architecture, and what its metadata keys begin with.
        block_names: part of a layer (``"attn_q"`` of blk.N.attn_q.weight) → Hugging Face module in the layer.
        outer_names: tensor outside of the layers, without .weight or .bias → Hugging Face module.
        layers: what stands before a layer's number in Hugging Face names.
        permuted: parts whose rows have the two numbers that are rotated together side by side → the config's field
            with the number of heads.
        flattened: parts that are a matrix in the file and a vector to the model (the norms of all heads).
        norm_offset: added to every norm's weight, to come from the file's values to Hugging Face's.
        config: the family's own fields. Gets the metadata without the architecture's prefix and the tensors by their
            names in the file; what it returns goes over the common fields.
        reads: metadata (without prefix) that ``config`` reads and that other families refuse, as arithmetic that
            they don't have.
    """

    architecture: str
    block_names: Mapping[str, str]
    outer_names: Mapping[str, str] = field(
        default_factory=lambda: {
            "token_embd": "model.embed_tokens",
            "output_norm": "model.norm",
            "output": "lm_head",
        }
    )
    layers: str = "model.layers"
    permuted: Mapping[str, str] = field(default_factory=dict)
    flattened: tuple[str, ...] = ()
    norm_offset: float = 0.0
    config: Callable[[Fields, Mapping[str, TensorEntry]], Config] = _no_more_metadata
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One architecture of Hugging Face.

    Attributes:
        architecture: the class name in config.json's ``architectures``.
        model_type: stands for the architecture where a config.json names none.
        defaults: values of fields that a config.json may leave out (a field that is null is not left out).
        prepare: config.json → the same with the common field names (rope_theta, text fields at the top, …), before
            anything is checked. Called on its own result too: it must leave that as it is.
        check: the family's own fields, checked; gets the common ones that have been checked. What it returns goes over
            the common fields: in it stands what the models read.
        eps_field: the norms' epsilon: ``"rms_norm_eps"`` or ``"layer_norm_eps"``.
        activations: values of hidden_act that the model computes, the default first.
        partial_rotary: partial_rotary_factor may be below 1; it is then among the normal form's fields.
        place: tensor of a Hugging Face checkpoint → the one that the model loads; None: the model has no such part.
        ignored: patterns (of the whole name) of tensors that follow from the config and are not loaded.
        gguf: how llama.cpp writes the family, if it does.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Config], Config] = _unchanged
    check: Callable[[Fields, Config], Config] = _nothing_more
    eps_field: str = "rms_norm_eps"
    activations: tuple[str, ...] = ("silu", "swish")
    partial_rotary: bool = False
    place: Callable[[str, Config], Placement | None] = _same_name
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    gguf: GGUFPart | None = None


def read_layer_types(fields: Fields, num_layers: int, default: list[str]) -> list[str]:
    """``layer_types``: ``"full_attention"`` or ``"sliding_attention"`` for each layer.

    Raises:
        CheckpointError: no list of as many names as there are layers.
        UnsupportedError: a kind of layer that octavo does not have.
    """
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(isinstance(kind, str) for kind in kinds):
        raise fields.wrong("layer_types", f"a list of {num_layers} names, one for each layer")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedError(
            f"{fields.file}: layer_types: {shown(min(unknown))} is not supported; "
            "supported: full_attention, sliding_attention"
        )
    return list(kinds)
