"""Matrix products with packed weights, and the embedding, which reads the same packed table."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo import _native
from octavo.kernels.activation import GateForm
from octavo.kernels.memory import huge_memory, passing_memory
from octavo.kernels.native.formats import CODED, Format, format_of, keeps
from octavo.kernels.native.tensors import TYPES, check, empty, rows_of
from octavo.kernels.packed_weight import MergedWeight, PackedWeight, Weight
from octavo.logging import init_logger

__all__ = [
    "embedding",
    "empty_weight",
    "fill_blocks",
    "fill_rows",
    "filled",
    "filled_bytes",
    "gated_linear",
    "keeps",
    "linear",
    "linear_add",
    "logits",
    "widened_in_products",
]


logger = init_logger(__name__)

# The library's names of functions.
_FUNCTIONS: dict[GateForm, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
# Numbers that are converted at a time: the pieces stay in a core's cache.
_PIECE = 1 << 18


def empty_weight(
    shape: tuple[int, int],
    dtype: torch.dtype,
    gated: bool = False,
    kept_as: str = "",
    input_order: Tensor | None = None,
) -> PackedWeight:
    if gated and shape[0] % 2:
        raise ValueError(f"a gate and an up projection are two halves, got {shape[0]} outputs")
    if kept_as.startswith("F8") and dtype != torch.bfloat16:
        raise ValueError(f"8-bit floats are widened to bfloat16 in products, not to {dtype}")
    if input_order is not None:
        check(torch.int32, (shape[1],), input_order=input_order)
        if not kept_as:
            raise ValueError("only quantized weights have their columns in another order")
        if not torch.equal(input_order.sort().values, torch.arange(shape[1], dtype=torch.int32)):
            raise ValueError("input_order does not have each input once")
    if kept_as:
        num_bytes = _native.packed_block_bytes(*format_of(kept_as), *shape, gated)
    else:
        num_bytes = _native.packed_bytes(TYPES[dtype], *shape, gated)
        if _coded_bytes(shape, dtype, gated):
            return PackedWeight(passing_memory(num_bytes), shape, dtype, gated)  # see `filled`
    return PackedWeight(huge_memory(num_bytes), shape, dtype, gated, kept_as, input_order=input_order)


def fill_blocks(weight: Weight, first_row: int, data: npt.NDArray[np.uint8]) -> None:
    if not isinstance(weight, PackedWeight) or not weight.kept_as:
        raise TypeError("fill_blocks was given a matrix that is not kept quantized")
    out_size, in_size = weight.shape
    number, span = format_of(weight.kept_as)
    row_bytes = _native.file_row_bytes(number, span, in_size)
    count, rest = divmod(len(data), row_bytes)
    if rest or not 0 <= first_row <= out_size - count:
        raise ValueError(
            f"{len(data)} bytes of {weight.kept_as} at row {first_row} are not rows of {row_bytes} bytes "
            f"of a weight {weight.shape}"
        )
    data = np.ascontiguousarray(data)
    _native.pack_blocks(
        number, span, data.ctypes.data, first_row, count, out_size, in_size, weight.gated, weight.data.data_ptr()
    )


def fill_rows(weight: Weight, first_row: int, rows: Tensor) -> None:
    if not isinstance(weight, PackedWeight) or weight.kept_as or weight.coded:
        raise TypeError("fill_rows was given a matrix that is not packed, kept quantized or whole already")
    out_size, in_size = weight.shape
    if rows.shape[1] != in_size or not 0 <= first_row <= out_size - len(rows):
        raise ValueError(f"rows {first_row} and up, {tuple(rows.shape)}, do not fit into a weight {weight.shape}")
    kind = TYPES[weight.dtype]
    # Whole blocks of outputs, where the first begins one.
    step = len(rows) if rows.dtype == weight.dtype else max(16, _PIECE // max(in_size, 1) // 16 * 16)
    for start in range(0, len(rows), max(step, 1)):
        piece = rows[start : start + step].to(weight.dtype).contiguous()
        _native.pack(
            kind,
            piece.data_ptr(),
            first_row + start,
            len(piece),
            out_size,
            in_size,
            weight.gated,
            weight.data.data_ptr(),
        )


def _coded_bytes(shape: tuple[int, int], dtype: torch.dtype, gated: bool) -> int:
    """Of a matrix whose exponents are coded (csrc/cpu/coded.hpp); 0: this level or this shape has no such form."""
    found: int = _native.coded_bytes(*shape, gated) if dtype == torch.bfloat16 else 0
    return found


def filled(weight: Weight) -> Weight:
    if not isinstance(weight, PackedWeight) or weight.kept_as or weight.coded:
        return weight
    num_bytes = _coded_bytes(weight.shape, weight.dtype, weight.gated)
    if num_bytes == 0:
        return weight
    data = huge_memory(num_bytes)
    if _native.encode(weight.data.data_ptr(), *weight.shape, weight.gated, data.data_ptr()):
        return replace(weight, data=data, coded=True)
    logger.info(
        "a matrix %s keeps its exponents of 8 bits: 512 of its weights have more than 16 different ones", weight.shape
    )
    plain = huge_memory(len(weight.data))
    plain.copy_(weight.data)
    return replace(weight, data=plain)


def widened_in_products(weight: Weight) -> Weight:
    if not isinstance(weight, PackedWeight) or not weight.kept_as or weight.kept_as.startswith("F8"):
        return weight
    if weight.dtype != torch.bfloat16:
        return weight
    scale = _native.half_scale(*format_of(weight.kept_as), weight.data.data_ptr(), *weight.shape, weight.gated)
    return replace(weight, half_scale=scale)


def filled_bytes(shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Of a matrix whose exponents can be coded."""
    whole: int = _native.packed_bytes(TYPES[dtype], *shape, False)
    return _coded_bytes(shape, dtype, False) or whole


def _packed(weight: Weight, gated: bool = False) -> PackedWeight:
    if isinstance(weight, MergedWeight):
        raise ValueError("a merged weight of several types was given to another op than linear")
    if not isinstance(weight, PackedWeight):
        packed = empty_weight((weight.shape[0], weight.shape[1]), weight.dtype, gated)
        fill_rows(packed, 0, weight)
        return packed  # read once: not worth coding
    if weight.gated != gated:
        raise ValueError(f"the weight was packed with gated={weight.gated}, expected gated={gated}")
    return weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, MergedWeight):
        return _product(x, _packed(weight), bias, x.dtype)
    out = empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    start = 0
    for part in weight.parts:
        end = start + part.shape[0]
        _product(x, part, None if bias is None else bias[start:end], x.dtype, out=out[:, start:end])
        start = end
    return out


def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, multiplier: float = 1.0) -> Tensor:
    return _product(x, _packed(weight), bias, torch.float32, residual=residual, multiplier=multiplier, out=residual)


def gated_linear(x: Tensor, weight: Weight, bias: Tensor | None, activation: GateForm) -> Tensor:
    return _product(x, _packed(weight, gated=True), bias, x.dtype, function=_FUNCTIONS[activation])


def logits(hidden: Tensor, weight: Weight, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    return _product(hidden, _packed(weight), None, torch.float32, multiplier=scale, softcap=softcap or 0.0)


def _format(weight: PackedWeight) -> Format:
    return CODED if weight.coded else format_of(weight.kept_as)


def _product(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    residual: Tensor | None = None,
    multiplier: float = 1.0,
    softcap: float = 0.0,
    function: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    out_size, in_size = weight.shape
    if x.dtype != weight.dtype or x.shape[-1] != in_size:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, the weight {weight.dtype} {weight.shape}")
    check(x.dtype, (out_size,), bias=bias)
    check(torch.float32, (x.shape[0], out_size), residual=residual)
    x = rows_of(x) if weight.input_order is None else _reordered(x, weight.input_order)
    if out is None:
        out = empty(x.shape[0], out_size // 2 if weight.gated else out_size, dtype=dtype)
    _native.linear(
        TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        *_format(weight),
        weight.data.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        TYPES[dtype],
        x.shape[0],
        in_size,
        out_size,
        0 if residual is None else residual.data_ptr(),
        multiplier,
        softcap,
        weight.gated,
        function,
        weight.half_scale,
    )
    return out


def _reordered(x: Tensor, order: Tensor, *, back: bool = False) -> Tensor:
    """``x[:, order]``, or with ``back`` what that was made of."""
    x = rows_of(x)
    out = empty(*x.shape, dtype=x.dtype)
    _native.reorder(
        TYPES[x.dtype], x.data_ptr(), x.stride(0), order.data_ptr(), back, out.data_ptr(), x.shape[0], x.shape[1]
    )
    return out


def embedding(token_ids: Tensor, table: Weight, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    table, ids = _packed(table), token_ids.contiguous()
    dtype = dtype or table.dtype
    out = empty(ids.shape[0], table.shape[1], dtype=dtype)
    check(torch.int64, None, token_ids=ids)
    _native.embedding(
        TYPES[table.dtype],
        ids.data_ptr(),
        *_format(table),
        table.data.data_ptr(),
        scale,
        TYPES[dtype],
        out.data_ptr(),
        ids.shape[0],
        table.shape[1],
        table.shape[0],
    )
    return out if table.input_order is None else _reordered(out, table.input_order, back=True)
