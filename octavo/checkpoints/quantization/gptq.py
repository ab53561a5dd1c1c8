"""GPTQ, as AutoGPTQ, GPTQModel and optimum write it.

Of a module: ``qweight`` int32 [in · bits / 32, out], numbers of successive inputs in a word, the first in the lowest
bits; ``scales`` [groups, out]; ``qzeros`` int32 [groups, out · bits / 32], those of successive outputs in a word;
``g_idx`` int32 [in], the group of each input (with act-order they are not neighbours).
"""

from functools import partial

import numpy as np
import numpy.typing as npt

from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.quantization.method import Quantization
from octavo.checkpoints.quantization.parts import FLOATS, Arrays, Parts, as_float32
from octavo.checkpoints.quantization.weight import Codes, QuantizedWeight
from octavo.checkpoints.tensor_entry import shown
from octavo.errors import UnsupportedError
from octavo.logging import init_logger

__all__ = ["read", "read_bits", "read_group_size"]

logger = init_logger(__name__)

_MAX = 2**31 - 1
# Form of the zeros: "gptq" keeps them less one.
_FORMS = ("gptq", "gptq_v2")


def read_bits(fields: Fields, key: str, supported: tuple[int, ...]) -> int:
    """Raises UnsupportedError for a number of bits that is none of these."""
    bits: int = fields.integer(key, 1, 32)
    if bits not in supported:
        known = ", ".join(map(str, supported))
        raise UnsupportedError(f"{fields.file}: {fields.where}{key}: {bits} is not supported; supported: {known}")
    return bits


def read_group_size(fields: Fields, key: str) -> int:
    """Inputs that share a scale; -1: all of a row."""
    size: int = fields.integer(key, -1, _MAX, default=-1)
    if size == 0:
        raise fields.wrong(key, "-1, or a number above 0")
    return size


def read(fields: Fields) -> Quantization:
    """From ``quantization_config``.

    Raises:
        CheckpointError: a field that is missing or wrong.
        UnsupportedError: a variant that octavo does not have.
    """
    bits = read_bits(fields, "bits", (4, 8))
    group_size = read_group_size(fields, "group_size")
    symmetric = fields.boolean("sym", default=True)
    reordered = fields.boolean("desc_act", default=False)
    form = _form(fields)
    _check_overrides(fields)
    groups = "rows" if group_size == -1 else f"groups of {group_size}"
    return Quantization(
        name="gptq",
        summary=f"GPTQ, {bits} bits in {groups}",
        suffixes=frozenset({"qweight", "qzeros", "scales", "g_idx"}),
        assemble=partial(
            _assemble,
            bits=bits,
            group_size=group_size,
            reordered=reordered,
            zeros=partial(_zeros, bits=bits, less_one=form == "gptq", symmetric=symmetric),
        ),
    )


def _form(fields: Fields) -> str:
    key = "checkpoint_format" if fields.values.get("checkpoint_format") is not None else "format"
    form: str = fields.string(key, default="gptq").lower()
    if fields.boolean("is_marlin_format", default=False):
        form = "marlin"
    if form not in _FORMS:
        raise UnsupportedError(
            f"{fields.file}: {fields.where}{key}: {shown(form)} is not supported; supported: {', '.join(_FORMS)}"
        )
    return form


def _check_overrides(fields: Fields) -> None:
    """Which modules are quantized is seen from their tensors; settings of their own are another matter."""
    dynamic = fields.nested("dynamic")
    for pattern in dynamic.values if dynamic else ():
        if not pattern.startswith("-:"):
            raise UnsupportedError(
                f"{fields.file}: {fields.where}dynamic: {shown(pattern)}: settings of single modules are not "
                "supported; supported: -: (modules that are not quantized)"
            )
    for key in ("adapter", "rotation"):
        if fields.values.get(key):
            raise UnsupportedError(f"{fields.file}: {fields.where}{key} is not supported")
    if fields.string("pack_dtype", default="int32") != "int32":
        raise UnsupportedError(
            f"{fields.file}: {fields.where}pack_dtype: {shown(fields.values['pack_dtype'])} is not supported; "
            "supported: int32"
        )


def _assemble(
    parts: Parts, bits: int, group_size: int, reordered: bool, zeros: "partial[Codes]"
) -> QuantizedWeight | None:
    per_word = 32 // bits
    num_words, out_size = parts.matrix("qweight", "I32")
    in_size = num_words * per_word
    group_size = in_size if group_size == -1 else group_size
    num_groups = -(-in_size // group_size)
    if out_size % per_word:
        raise parts.wrong("qweight", f"has {out_size} outputs, a multiple of {per_word} is expected")
    parts.check("scales", FLOATS, (num_groups, out_size))
    parts.check("qzeros", ("I32",), (num_groups, out_size // per_word))
    return QuantizedWeight(
        kind=f"U{bits}",
        shape=(out_size, in_size),
        group_size=group_size,
        parts=parts,
        main="qweight",
        codes=_codes,
        scales=_scales,
        zeros=zeros,
        input_groups=_input_groups(parts, in_size, group_size, num_groups, reordered),
    )


def _input_groups(
    parts: Parts, in_size: int, group_size: int, num_groups: int, reordered: bool
) -> npt.NDArray[np.int64] | None:
    """What g_idx says, unless that inputs of a group are neighbours."""
    if "g_idx" not in parts:
        if reordered and num_groups > 1:
            raise parts.wrong("g_idx", "is missing; desc_act says that the inputs are in an order of their own")
        return None
    parts.check("g_idx", ("I32",), (in_size,))
    found = parts.array("g_idx").astype(np.int64)
    # All zeros say nothing, where nothing was reordered.
    if np.array_equal(found, np.arange(in_size) // group_size) or not (reordered or found.any()):
        return None
    if found.max() >= num_groups:
        raise parts.wrong("g_idx", f"names group {found.max()} of {num_groups}")
    return found


def _codes(arrays: Arrays, first: int, last: int) -> Codes:
    """A word's bytes are in the order of the inputs: rows of words, put side by side, are rows of codes."""
    return np.ascontiguousarray(arrays["qweight"][:, first:last].T).view(np.uint8)


def _scales(arrays: Arrays, first: int, last: int) -> npt.NDArray[np.float32]:
    return as_float32(arrays["scales"][:, first:last]).T


def _zeros(arrays: Arrays, first: int, last: int, bits: int, less_one: bool, symmetric: bool) -> Codes:
    packed = np.ascontiguousarray(arrays["qzeros"]).view(np.uint8)
    middle = 0x88 if bits == 4 else 0x80
    if less_one and symmetric and np.all(packed == middle):
        less_one = False  # some writers say "gptq" and keep zeros as they are: symmetric ones give it away
    if bits == 8:
        zeros = packed[:, first:last]
    else:
        halves = packed[:, first // 2 : (last + 1) // 2]
        zeros = np.stack([halves & 15, halves >> 4], axis=-1).reshape(len(packed), -1)
        zeros = zeros[:, first % 2 : first % 2 + last - first]
    # A zero of 0 was kept as all ones.
    return ((zeros + np.uint8(less_one)) & np.uint8(2**bits - 1)).T
