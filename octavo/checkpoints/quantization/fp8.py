"""8-bit floats with a scale for each block, row or weight, as DeepSeek, Qwen and vLLM have them (``fp8``), and Meta
(``fbgemm_fp8``).

Of a module: ``weight`` e4m3fn [out, in]; ``weight_scale_inv`` (a block's) or ``weight_scale`` (a row's or a weight's),
which each number is multiplied with, whatever the name says; ``input_scale``, which octavo has no use for.
"""

from functools import partial

import numpy as np

from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.quantization.grid import ScaleGrid
from octavo.checkpoints.quantization.method import Quantization
from octavo.checkpoints.quantization.parts import FLOATS, SCALES, Arrays, Parts
from octavo.checkpoints.quantization.weight import Codes, QuantizedWeight
from octavo.checkpoints.tensor_entry import shown
from octavo.errors import UnsupportedError

__all__ = ["read"]

_MAX = 2**31 - 1
_SCALES = ("weight_scale_inv", "weight_scale")
# Of activations and the cache.
_UNUSED = frozenset(
    {"input_scale", "activation_scale", "input_scale_ub", "output_scale", "k_scale", "v_scale", "kv_scale", "q_scale"}
)
_OTHER_FLOATS = ("F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def read(fields: Fields) -> Quantization:
    """From ``quantization_config``.

    Raises:
        CheckpointError: a field that is missing or wrong.
        UnsupportedError: a variant that octavo does not have.
    """
    _supported(fields, "fmt", ("e4m3", "float8_e4m3fn"))
    _supported(fields, "activation_scheme", ("dynamic", "static"))
    _supported(fields, "expert_dtype", ("fp8",))
    block = fields.values.get("weight_block_size")
    if block is not None and (
        not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= _MAX for n in block)
    ):
        raise fields.wrong("weight_block_size", "two numbers above 0")
    return Quantization(
        name="fp8",
        summary=f"fp8, {f'blocks of {block[0]}×{block[1]}' if block else 'a scale for each row or weight'}",
        suffixes=frozenset({"weight", *_SCALES}),
        assemble=partial(_assemble, block=(block[0], block[1]) if block else None),
        unused=_UNUSED,
        notes=("activations are not rounded to 8 bits: only the weights' quantization is followed",),
    )


def _supported(fields: Fields, key: str, values: tuple[str, ...]) -> None:
    found = fields.string(key, default=values[0])
    if found not in values:
        raise UnsupportedError(
            f"{fields.file}: {fields.where}{key}: {shown(found)} is not supported; supported: {', '.join(values)}"
        )


def _assemble(parts: Parts, block: tuple[int, int] | None) -> QuantizedWeight | None:
    if "weight" in parts and parts.type_of("weight", *FLOATS, "F8_E4M3", *_OTHER_FLOATS) in _OTHER_FLOATS:
        raise UnsupportedError(
            f"{parts.stored['weight'].file}: tensor '{parts.module}.weight': type "
            f"{parts.stored['weight'].entry.type.name} is not supported; supported: F8_E4M3"
        )
    scale = next((suffix for suffix in _SCALES if suffix in parts), None)
    if scale is None and ("weight" not in parts or parts.stored["weight"].entry.type.name != "F8_E4M3"):
        return None
    shape = parts.matrix("weight", "F8_E4M3")
    if scale is None:
        scale = _SCALES[0] if block else _SCALES[1]
    parts.type_of(scale, *SCALES)
    if block is not None:
        grid = ScaleGrid(shape, *block)
    else:
        by_row = parts.shape_of(scale)[:1] == (shape[0],) and shape[0] > 1
        grid = ScaleGrid(shape, 1 if by_row else shape[0], shape[1])
    grid.check(parts, scale)
    return QuantizedWeight(
        kind="F8_E4M3",
        shape=shape,
        group_size=grid.columns,
        parts=parts,
        main="weight",
        codes=_codes,
        scales=grid.scales(scale),
    )


def _codes(arrays: Arrays, first: int, last: int) -> Codes:
    codes: Codes = np.ascontiguousarray(arrays["weight"][first:last])
    return codes
