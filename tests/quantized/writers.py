"""Quantized weights as the formats' definitions have them, written number by number: what readers are tested against.

A `Quantized` is what a weight is before it is packed; ``values`` is the definition of what it stands for.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

__all__ = ["Quantized", "awq_parts", "drawn", "gptq_parts", "pack", "quantized_folder", "rounded"]

Numbers = npt.NDArray[np.int64]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Quantized:
    """q [out, in] from 0, scale [out, groups], zero [out, groups], groups [in]: the group of each input."""

    bits: int
    q: Numbers
    scale: Tensor
    zero: Numbers
    groups: Numbers

    @property
    def values(self) -> npt.NDArray[np.float32]:
        scale = self.scale.float().numpy()[:, self.groups]
        return (scale * (self.q - self.zero[:, self.groups]).astype(np.float32)).astype(np.float32)


def drawn(
    shape: tuple[int, int],
    group_size: int,
    bits: int = 4,
    symmetric: bool = False,
    seed: int = 0,
    scale_type: torch.dtype = torch.float16,
) -> Quantized:
    """Random, with every number and zero there is; group_size -1: a scale for each row."""
    random = np.random.default_rng(seed)
    out_size, in_size = shape
    group_size = in_size if group_size == -1 else group_size
    num_groups = -(-in_size // group_size)
    top = 2**bits
    zero = random.integers(0, top, (out_size, num_groups))
    return Quantized(
        bits=bits,
        q=random.integers(0, top, shape),
        scale=torch.from_numpy(random.uniform(0.01, 0.1, (out_size, num_groups))).to(scale_type),
        zero=np.full_like(zero, top // 2) if symmetric else zero,
        groups=np.arange(in_size) // group_size,
    )


def rounded(
    weight: Tensor,
    group_size: int,
    bits: int = 4,
    symmetric: bool = False,
    groups: Numbers | None = None,
    scale_type: torch.dtype = torch.float16,
) -> Quantized:
    """A weight [out, in], each group's numbers between its smallest and its largest value."""
    out_size, in_size = weight.shape
    group_size = in_size if group_size == -1 else group_size
    groups = np.arange(in_size) // group_size if groups is None else groups
    values = weight.double().numpy()
    top = 2**bits - 1
    scales, zeros = [], []
    for group in range(groups.max() + 1):
        part = values[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            scale = np.maximum(-low, high) / (top // 2)
            zero = np.full(out_size, (top + 1) // 2)
        else:
            scale = (high - low) / top
            zero = np.clip(np.rint(-low / scale), 0, top).astype(np.int64)
        scales.append(scale)
        zeros.append(zero)
    scale_of = torch.from_numpy(np.stack(scales, 1)).to(scale_type)
    zero_of = np.stack(zeros, 1)
    steps = np.rint(values / scale_of.double().numpy()[:, groups]).astype(np.int64) + zero_of[:, groups]
    return Quantized(bits, np.clip(steps, 0, top), scale_of, zero_of, groups)


def pack(numbers: Numbers, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, n] → int32 [rows, n · bits / 32]: a word's i-th bits from below are number ``order[i]`` of it."""
    per_word = 32 // bits
    grouped = numbers.reshape(len(numbers), -1, per_word)
    words = np.zeros(grouped.shape[:2], np.uint64)
    for place, index in enumerate(order or range(per_word)):
        words |= grouped[:, :, index].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def gptq_parts(weight: Quantized, less_one: bool = True) -> dict[str, Tensor]:
    """Suffix → tensor, as AutoGPTQ writes them; ``less_one``: the first form of zeros."""
    zero = (weight.zero - 1) % 2**weight.bits if less_one else weight.zero
    return {
        "qweight": pack(weight.q, weight.bits).T.contiguous(),
        "qzeros": pack(zero.T, weight.bits),
        "scales": weight.scale.T.contiguous(),
        "g_idx": torch.from_numpy(weight.groups).int(),
    }


def awq_parts(weight: Quantized) -> dict[str, Tensor]:
    """Suffix → tensor, as AutoAWQ writes them."""
    return {
        "qweight": pack(weight.q.T, 4, AWQ_ORDER),
        "qzeros": pack(weight.zero.T, 4, AWQ_ORDER),
        "scales": weight.scale.T.contiguous(),
    }


def quantized_folder(
    folder: Path,
    target: Path,
    quantize: Callable[[str, Tensor], tuple[dict[str, Tensor], npt.NDArray[np.float32]] | None],
    settings: dict[str, Any],
    ending: str = "_proj.weight",
) -> tuple[Path, Path]:
    """(a folder with the weights of ``folder`` whose names have that ending quantized, one with what they then stand
    for).

    Args:
        quantize: module's name, weight → (its tensors by suffix, their values); None: it stays as it is.
        settings: quantization_config.
    """
    packed, plain = target / "quantized", target / "dequantized"
    shutil.copytree(folder, packed)
    shutil.copytree(folder, plain)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    stored, values = {}, {}
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        found = quantize(module, tensor) if name.endswith(ending) else None
        if found is None:
            stored[name] = values[name] = tensor
            continue
        stored |= {f"{module}.{suffix}": part for suffix, part in found[0].items()}
        values[name] = torch.from_numpy(found[1])
    safetensors.torch.save_file(stored, packed / "model.safetensors", {"format": "pt"})
    safetensors.torch.save_file(values, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": settings}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain
