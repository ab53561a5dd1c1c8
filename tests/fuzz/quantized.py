"""The tiny model with its weights quantized, in each of Hugging Face's forms."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.quantized.compressed import compressed, settings
from tests.quantized.writers import Quantized, awq_parts, gptq_parts, quantized_folder, rounded

__all__ = ["QUANTIZED", "write_quantized"]

_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
_W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


def _by(parts: Callable[[Quantized], dict[str, Tensor]], ordered: bool = True) -> Callable[[Tensor], dict[str, Tensor]]:
    def quantize(weight: Tensor) -> dict[str, Tensor]:
        groups = np.arange(weight.shape[1]) // 32
        return parts(rounded(weight, 32, groups=groups if ordered else groups[::-1].copy()))

    return quantize


def _fp8(weight: Tensor) -> dict[str, Tensor]:
    return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(len(weight) // 32, 1)}


# Name → (weight → its tensors, quantization_config).
QUANTIZED: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "gptq": (_by(gptq_parts), _GPTQ),
    "gptq-act-order": (_by(gptq_parts, ordered=False), _GPTQ | {"desc_act": True}),
    "awq": (_by(awq_parts), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "pack-quantized": (
        lambda weight: compressed(weight, "pack-quantized", **_W4)[0],
        settings("pack-quantized", **_W4),
    ),
    "int-quantized": (lambda weight: compressed(weight, "int-quantized", **_W8)[0], settings("int-quantized", **_W8)),
    "fp8": (_fp8, {"quant_method": "fp8", "weight_block_size": [32, 256]}),
}


def write_quantized(folder: Path, target: Path, name: str) -> None:
    """``folder`` with its linear weights quantized."""
    parts, config = QUANTIZED[name]
    packed, plain = quantized_folder(
        folder, target.with_name(f"{name}-parts"), lambda module, weight: (parts(weight), weight.numpy()), config
    )
    shutil.rmtree(plain)
    packed.rename(target)
    packed.parent.rmdir()
