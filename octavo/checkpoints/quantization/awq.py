"""AWQ, as AutoAWQ writes it (version GEMM).

Of a module: ``qweight`` int32 [in, out / 8], ``qzeros`` int32 [groups, out / 8], ``scales`` [groups, out]. A word has
the numbers of eight successive outputs, from its lowest bits on those of output 0, 2, 4, 6, 1, 3, 5, 7.
"""

from functools import partial

import numpy as np
import numpy.typing as npt

from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.quantization.gptq import read_bits, read_group_size
from octavo.checkpoints.quantization.method import Quantization
from octavo.checkpoints.quantization.parts import FLOATS, Array, Arrays, Parts, as_float32
from octavo.checkpoints.quantization.weight import Codes, QuantizedWeight
from octavo.checkpoints.tensor_entry import shown
from octavo.errors import UnsupportedError

__all__ = ["read"]

_OUTPUTS = 8  # of a word
# Which output each of a word's four low halves is of, and each of the high ones.
_LOW, _HIGH = (0, 4, 1, 5), (2, 6, 3, 7)
_LOW_BITS = np.uint32(0x0F0F0F0F)
# Inputs and words that are unpacked at a time, to stay in the L2 cache while they change order. No powers of two both:
# rows a power of two apart would get into each other's way there.
_INPUTS, _WORDS = 512, 100


def read(fields: Fields) -> Quantization:
    """From ``quantization_config`` or AutoAWQ's own quant_config.json.

    Raises:
        CheckpointError: a field that is missing or wrong.
        UnsupportedError: a variant that octavo does not have.
    """
    read_bits(fields, "w_bit" if "w_bit" in fields.values else "bits", (4,))
    group_size = read_group_size(fields, "q_group_size" if "q_group_size" in fields.values else "group_size")
    has_zeros = fields.boolean("zero_point", default=True)
    key = "version" if fields.values.get("version") is not None else "format"
    version = fields.string(key, default="gemm")
    if version.lower() != "gemm":
        raise UnsupportedError(
            f"{fields.file}: {fields.where}{key}: {shown(version)} is not supported; supported: gemm"
        )
    groups = "rows" if group_size == -1 else f"groups of {group_size}"
    return Quantization(
        name="awq",
        summary=f"AWQ, 4 bits in {groups}",
        suffixes=frozenset({"qweight", "qzeros", "scales"}),
        assemble=partial(_assemble, group_size=group_size, has_zeros=has_zeros),
    )


def _assemble(parts: Parts, group_size: int, has_zeros: bool) -> QuantizedWeight | None:
    in_size, num_words = parts.matrix("qweight", "I32")
    out_size = num_words * _OUTPUTS
    if in_size % 2:
        raise parts.wrong("qweight", f"has {in_size} inputs, an even number is expected")
    group_size = in_size if group_size == -1 else group_size
    num_groups = -(-in_size // group_size)
    parts.check("scales", FLOATS, (num_groups, out_size))
    if has_zeros or "qzeros" in parts:
        parts.check("qzeros", ("I32",), (num_groups, num_words))
    return QuantizedWeight(
        kind="U4",
        shape=(out_size, in_size),
        group_size=group_size,
        parts=parts,
        main="qweight",
        codes=_codes,
        scales=_scales,
        zeros=_zeros if "qzeros" in parts else None,
    )


def _codes(arrays: Arrays, first: int, last: int) -> Codes:
    begin, end = first // _OUTPUTS, -(-last // _OUTPUTS)
    words = arrays["qweight"][:, begin:end]
    codes = np.empty((end - begin, _OUTPUTS, len(words) // 2), np.uint8)
    for word in range(0, end - begin, _WORDS):
        for start in range(0, len(words), _INPUTS):
            part = words[start : start + _INPUTS, word : word + _WORDS]
            _transpose(part, codes[word : word + _WORDS, :, start // 2 : (start + _INPUTS) // 2])
    return codes.reshape(-1, len(words) // 2)[first - begin * _OUTPUTS : last - begin * _OUTPUTS]


def _transpose(words: Array, codes: Codes) -> None:
    """Words [inputs, words] → codes [words, 8 outputs, inputs / 2]."""
    even, odd = words[0::2], words[1::2]
    low = (even & _LOW_BITS) | ((odd & _LOW_BITS) << np.uint32(4))
    high = ((even >> np.uint32(4)) & _LOW_BITS) | (odd & ~_LOW_BITS)
    for pairs, outputs in ((low, _LOW), (high, _HIGH)):
        columns = pairs.view(np.uint8).reshape(*pairs.shape, 4)
        for index, output in enumerate(outputs):
            codes[:, output] = columns[:, :, index].T


def _scales(arrays: Arrays, first: int, last: int) -> npt.NDArray[np.float32]:
    return as_float32(arrays["scales"][:, first:last]).T


def _zeros(arrays: Arrays, first: int, last: int) -> Codes:
    begin, end = first // _OUTPUTS, -(-last // _OUTPUTS)
    columns = np.ascontiguousarray(arrays["qzeros"][:, begin:end]).view(np.uint8).reshape(-1, end - begin, 4)
    zeros = np.empty((len(columns), end - begin, _OUTPUTS), np.uint8)
    zeros[..., _LOW] = columns & 15
    zeros[..., _HIGH] = columns >> 4
    return zeros.reshape(len(columns), -1)[:, first - begin * _OUTPUTS : last - begin * _OUTPUTS].T
