"""compressed-tensors, as llm-compressor writes it: integers of 4 and 8 bits, and 8-bit floats.

Of a module, packed: ``weight_packed`` int32 [out, in · bits / 32], numbers of successive inputs in a word, the first
in the lowest bits, from 0; ``weight_shape`` [out, in]; ``weight_zero_point`` int32 [out · bits / 32, groups], packed
the other way. Not packed: ``weight`` int8 or e4m3 [out, in], ``weight_zero_point`` int8. ``weight_scale`` is a grid;
``weight_g_idx`` int32 [in], the group of each input, where act-order was used.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.quantization.grid import ScaleGrid
from octavo.checkpoints.quantization.method import Quantization
from octavo.checkpoints.quantization.parts import FLOATS, Arrays, Parts
from octavo.checkpoints.quantization.weight import Codes, QuantizedWeight
from octavo.checkpoints.tensor_entry import shown
from octavo.errors import CheckpointError, UnsupportedError

__all__ = ["read"]

_MAX = 2**31 - 1
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_SUFFIXES = frozenset({"weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"})
# Of activations and the cache.
_UNUSED = frozenset(
    {"input_scale", "input_zero_point", "output_scale", "output_zero_point"}
    | {"k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point"}
)
_PATTERN = "re:"
_EMBEDDINGS = ("embed_tokens", "embed_in", "wte")
# Patterns that a regular expression can be slow with are not needed to name modules: within these bounds, the slowest
# takes 40 ms.
_MOST_PATTERNS = 32
_LONGEST_NAME = 128
_LONGEST_PATTERN = 256
_MOST_QUANTIFIERS = 4
_REPEATED_GROUP = re.compile(r"\)[*+{?]")


@dataclass(frozen=True)
class _Scheme:
    """How the weights of some modules are quantized. ``rows`` and ``columns`` are those of `ScaleGrid`; 0: all."""

    targets: list[str]
    bits: int
    is_float: bool
    symmetric: bool
    rows: int
    columns: int
    reordered: bool


def read(fields: Fields) -> Quantization:
    """From ``quantization_config``.

    Raises:
        CheckpointError: a field that is missing or wrong.
        UnsupportedError: a format or scheme that octavo does not have.
    """
    form = _format(fields, fields.string("format", default="mixed-precision"))
    _check_nothing_more(fields)
    _names(fields, "ignore", default=[])  # what is not quantized is seen from its tensors
    groups = fields.nested("config_groups")
    if groups is None or not groups.values:
        raise fields.wrong("config_groups", "an object with a scheme for each group")
    schemes, notes = [], []
    for name in groups.values:
        group = groups.nested(name)
        if group is None:
            raise groups.wrong(name, "an object")
        notes += _notes(group)
        weights = group.nested("weights")
        if weights is not None:
            schemes.append(_scheme(group, weights))
    patterns = [target for scheme in schemes for target in scheme.targets if target.startswith(_PATTERN)]
    if len(patterns) > _MOST_PATTERNS:
        raise UnsupportedError(
            f"{fields.file}: {fields.where}config_groups: {len(patterns)} patterns; octavo follows {_MOST_PATTERNS}"
        )
    if fields.nested("kv_cache_scheme") is not None:
        notes.append("kv_cache_scheme is not followed; --kv-cache-dtype says how the cache is kept")
    kinds = dict.fromkeys(f"{'e4m3' if each.is_float else f'int{each.bits}'} {_sharing(each)}" for each in schemes)
    return Quantization(
        name="compressed-tensors",
        summary=f"compressed-tensors, {form}: {', '.join(kinds)}",
        suffixes=_SUFFIXES,
        assemble=partial(_assemble, schemes=schemes, file=str(fields.file)),
        unused=_UNUSED,
        notes=tuple(dict.fromkeys(notes)),
    )


def _format(fields: Fields, form: str) -> str:
    if form not in (*_FORMATS, "mixed-precision"):
        raise UnsupportedError(
            f"{fields.file}: {fields.where}format: {shown(form)} is not supported; supported: {', '.join(_FORMATS)}"
        )
    return form


def _check_nothing_more(fields: Fields) -> None:
    sparsity = fields.nested("sparsity_config")
    if sparsity is not None and sparsity.string("format", default="dense") != "dense":
        raise UnsupportedError(
            f"{sparsity.file}: {sparsity.where}format: {shown(sparsity.values['format'])} is not supported; "
            "supported: dense"
        )
    transforms = fields.nested("transform_config")
    if transforms is not None and transforms.values.get("config_groups"):
        raise UnsupportedError(f"{fields.file}: {fields.where}transform_config is not supported")


def _names(fields: Fields, key: str, default: Any = None) -> list[str]:
    found = fields.values.get(key)
    found = default if found is None else found
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise fields.wrong(key, "a list of names")
    return found


def _scheme(group: Fields, weights: Fields) -> _Scheme:
    own = group.string("format", default=None)
    if own is not None:
        _format(group, own)
    targets = _names(group, "targets")
    for target in targets:
        if target.startswith(_PATTERN):
            _check_pattern(target.removeprefix(_PATTERN), group)
    bits = weights.integer("num_bits", 1, 32, default=8)
    kind = weights.string("type", default="int").lower()
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise UnsupportedError(
            f"{weights.file}: {weights.where}num_bits, type: {shown(kind)} of {bits} bits is not supported; "
            "supported: int of 4 and 8, float of 8"
        )
    if weights.values.get("dynamic"):
        raise UnsupportedError(f"{weights.file}: {weights.where}dynamic weights are not supported")
    rows, columns = _sharing_of(weights)
    return _Scheme(
        targets=targets,
        bits=bits,
        is_float=kind == "float",
        symmetric=weights.boolean("symmetric", default=True),
        rows=rows,
        columns=columns,
        reordered=weights.values.get("actorder") in (True, "group", "dynamic"),
    )


def _sharing_of(weights: Fields) -> tuple[int, int]:
    """(rows, columns) that share a scale, from strategy, group_size and block_structure."""
    group_size = weights.integer("group_size", -1, _MAX, default=None)
    default = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = weights.string("strategy", default=default)
    if strategy not in _STRATEGIES:
        raise UnsupportedError(
            f"{weights.file}: {weights.where}strategy: {shown(strategy)} is not supported; "
            f"supported: {', '.join(_STRATEGIES)}"
        )
    if strategy == "group":
        if group_size is None or group_size < 1:
            raise weights.wrong("group_size", "a number above 0 with strategy group")
        return 1, group_size
    if strategy == "block":
        block = weights.values.get("block_structure")
        if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= _MAX for n in block):
            raise weights.wrong("block_structure", "two numbers above 0 with strategy block")
        return block[0], block[1]
    return (1, 0) if strategy == "channel" else (0, 0)


def _sharing(scheme: _Scheme) -> str:
    if scheme.columns:
        return f"in groups of {scheme.columns}" if scheme.rows == 1 else f"in blocks of {scheme.rows}×{scheme.columns}"
    return "in rows" if scheme.rows else "with one scale a weight"


def _notes(group: Fields) -> list[str]:
    notes = []
    for key in ("input_activations", "output_activations"):
        activations = group.nested(key)
        if activations is not None:
            bits, kind = activations.integer("num_bits", 1, 32, default=8), activations.string("type", default="int")
            notes.append(f"{key} are not rounded to {kind} of {bits} bits: only the weights' quantization is followed")
    return notes


def _check_pattern(pattern: str, group: Fields) -> None:
    if (
        len(pattern) > _LONGEST_PATTERN
        or len(re.findall(r"[*+{]", pattern)) > _MOST_QUANTIFIERS
        or _REPEATED_GROUP.search(pattern)
    ):
        raise UnsupportedError(
            f"{group.file}: {group.where}targets: {shown(pattern)}: a pattern of more than {_LONGEST_PATTERN} "
            f"characters or {_MOST_QUANTIFIERS} repetitions, or with a repeated group, is not followed"
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise group.wrong("targets", "names, or patterns after re:") from error


def _scheme_of(parts: Parts, schemes: list[_Scheme], file: str) -> _Scheme:
    """The module's scheme: by its name, by a pattern, or by its class (Linear, but for embeddings)."""
    kind = "Embedding" if parts.module.rpartition(".")[2] in _EMBEDDINGS else "Linear"
    by_rank: list[Callable[[str], bool]] = [
        lambda target: target == parts.module,
        lambda target: target.startswith(_PATTERN) and _matches(target.removeprefix(_PATTERN), parts),
        lambda target: target == kind,
    ]
    for matches in by_rank:
        for scheme in schemes:
            if any(matches(target) for target in scheme.targets):
                return scheme
    raise CheckpointError(
        f"{parts.module} is quantized, and no group of quantization_config.config_groups has it among its targets",
        file=file,
    )


def _matches(pattern: str, parts: Parts) -> bool:
    if len(parts.module) > _LONGEST_NAME:
        raise UnsupportedError(
            f"{next(iter(parts.stored.values())).file}: module {shown(parts.module)}: its name is too long for the "
            f"patterns of quantization_config; octavo follows them up to {_LONGEST_NAME} characters"
        )
    return re.match(pattern, parts.module) is not None


def _assemble(parts: Parts, schemes: list[_Scheme], file: str) -> QuantizedWeight | None:
    plain = None if parts.has_any("weight_packed", "weight_scale") else parts.stored.get("weight")
    if plain is not None and plain.entry.type.name not in ("I8", "F8_E4M3"):
        return None  # its type is checked with all others
    scheme = _scheme_of(parts, schemes, file)
    main = "weight_packed" if "weight_packed" in parts else "weight"
    shape = _packed_shape(parts, scheme.bits) if main == "weight_packed" else _plain_shape(parts, scheme)
    grid = ScaleGrid(shape, scheme.rows or shape[0], scheme.columns or shape[1])
    grid.check(parts, "weight_scale")
    kind = "F8_E4M3" if scheme.is_float else "U4" if main == "weight_packed" and scheme.bits == 4 else "U8"
    return QuantizedWeight(
        kind=kind,
        shape=shape,
        group_size=grid.columns,
        parts=parts,
        main=main,
        codes=partial(_codes, main=main, is_float=scheme.is_float),
        scales=grid.scales("weight_scale"),
        zeros=_zeros_of(parts, scheme, grid, main),
        input_groups=_input_groups(parts, grid, scheme.reordered),
    )


def _packed_shape(parts: Parts, bits: int) -> tuple[int, int]:
    out_size, num_words = parts.matrix("weight_packed", "I32")
    parts.check("weight_shape", ("I64", "I32"), (2,))
    stated = parts.array("weight_shape").tolist()
    if stated[0] != out_size or not 0 < stated[1] <= _MAX or -(-stated[1] * bits // 32) != num_words:
        raise parts.wrong(
            "weight_shape", f"is {stated}, and weight_packed has {out_size} rows of {num_words} words of {bits} bits"
        )
    return out_size, stated[1]


def _plain_shape(parts: Parts, scheme: _Scheme) -> tuple[int, int]:
    if parts.type_of("weight", *FLOATS, "I8", "F8_E4M3") in FLOATS:
        raise UnsupportedError(
            f"{parts.stored['weight'].file}: tensor '{parts.module}.weight' is not quantized and has a scale: "
            "octavo does not round weights while it computes"
        )
    return parts.matrix("weight", "F8_E4M3" if scheme.is_float else "I8")


def _codes(arrays: Arrays, first: int, last: int, main: str, is_float: bool) -> Codes:
    rows = np.ascontiguousarray(arrays[main][first:last]).view(np.uint8)
    # int8 to a number from 0: its sign bit turned over.
    return rows if is_float or main == "weight_packed" else rows ^ np.uint8(0x80)


def _zeros_of(parts: Parts, scheme: _Scheme, grid: ScaleGrid, main: str) -> Callable[[Arrays, int, int], Codes] | None:
    suffix = "weight_zero_point"
    if suffix not in parts and scheme.symmetric:
        return None
    if scheme.is_float:
        parts.type_of(suffix, "F8_E4M3", "I8")
        if parts.array(suffix).any():  # some writers add zeros where there is nothing to say
            raise UnsupportedError(
                f"{parts.stored[suffix].file}: tensor '{parts.module}.{suffix}': floats with a zero point are not "
                "supported"
            )
        return None
    if parts.type_of(suffix, "I8", "I32") == "I8":
        grid.check(parts, suffix, ("I8",))
        middle = 8 if main == "weight_packed" and scheme.bits == 4 else 128
        stated = parts.array(suffix)
        if middle == 8 and (stated.min() < -8 or stated.max() > 7):
            raise parts.wrong(suffix, f"has numbers from {stated.min()} to {stated.max()}, which are not of 4 bits")
        return partial(_plain_zeros, grid=grid, middle=middle)
    per_word = 32 // scheme.bits
    parts.check(suffix, ("I32",), (-(-grid.size[0] // per_word), grid.size[1]))
    if main != "weight_packed":
        raise parts.wrong(suffix, "is packed, and the weight is not")
    return partial(_packed_zeros, grid=grid, bits=scheme.bits)


def _plain_zeros(arrays: Arrays, first: int, last: int, grid: ScaleGrid, middle: int) -> Codes:
    zeros = grid.of_rows(arrays["weight_zero_point"], first, last).astype(np.int16) + middle
    return zeros.astype(np.uint8)


def _packed_zeros(arrays: Arrays, first: int, last: int, grid: ScaleGrid, bits: int) -> Codes:
    """Numbers of successive rows of the grid are in a word."""
    row = np.arange(first, last) // grid.rows
    words = arrays["weight_zero_point"][row // (32 // bits)]
    shifts = (row % (32 // bits) * bits).astype(np.uint32)[:, None]
    zeros: npt.NDArray[np.uint8] = ((words >> shifts) & np.uint32(2**bits - 1)).astype(np.uint8)
    return zeros


def _input_groups(parts: Parts, grid: ScaleGrid, reordered: bool) -> npt.NDArray[np.int64] | None:
    """What weight_g_idx says, unless that inputs of a group are neighbours; -1 everywhere says nothing."""
    in_size, num_groups = grid.shape[1], grid.size[1]
    if "weight_g_idx" not in parts:
        if reordered and num_groups > 1:
            raise parts.wrong("weight_g_idx", "is missing; actorder says that the inputs are in an order of their own")
        return None
    parts.check("weight_g_idx", ("I32",), (in_size,))
    found = parts.array("weight_g_idx").view(np.int32).astype(np.int64)
    if np.array_equal(found, np.arange(in_size) // grid.columns) or np.all(found == -1):
        return None
    if found.min() < 0 or found.max() >= num_groups:
        wrong = found.min() if found.min() < 0 else found.max()
        raise parts.wrong("weight_g_idx", f"names group {wrong} of {num_groups}")
    return found
