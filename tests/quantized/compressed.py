"""Weights as the compressed-tensors package compresses them, and what it decompresses them to."""

from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

__all__ = ["compressed", "settings"]


def settings(form: str, targets: tuple[str, ...] = ("Linear",), **weights: Any) -> dict[str, Any]:
    """quantization_config for all modules of a class, as the package writes it; ``weights`` as QuantizationArgs."""
    group = {"targets": list(targets), "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
    }


def compressed(
    weight: Tensor, form: str, scale_type: torch.dtype = torch.float32, **weights: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """(suffix → tensor, the values that they stand for, in the type of the scales)."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    low, high = _ranges(weight, args)
    scale, zero = calculate_qparams(low, high, args)
    state = {"weight": weight, "weight_scale": scale.to(scale_type)}
    if not args.symmetric:
        state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(form)
    parts = compressor.compress(dict(state), scheme)
    return parts, compressor.decompress(dict(parts), scheme)["weight"]


def _ranges(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value under each scale, shaped as the scales are."""
    out_size, in_size = weight.shape
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    rows, columns = {
        "channel": (1, in_size),
        "group": (1, args.group_size),
        "block": tuple(args.block_structure or (1, 1)),
    }[str(args.strategy)]
    padded = torch.nn.functional.pad(weight, (0, -in_size % columns, 0, -out_size % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amin((1, 3)), blocks.amax((1, 3))
