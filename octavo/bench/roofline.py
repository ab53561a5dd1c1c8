"""``octavo bench roofline``: how fast this machine reads as many bytes as a model has, and how fast it multiplies."""

import math
from pathlib import Path
from typing import Any

from octavo.checkpoints import CheckpointTensor, iterate_tensors, read_model_facts, readable_type, resolve_model
from octavo.config import QUANTIZED_WHILE_LOADING
from octavo.errors import UnsupportedError
from octavo.platforms import current_platform

__all__ = ["measure_roofline", "step_bytes"]

_PAGE = 4096
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_EMBEDDINGS, _HEAD = ("model.embed_tokens.weight", "gpt_neox.embed_in.weight"), "lm_head.weight"


def measure_roofline(model: str, dtype: str = "bfloat16", quantization: str = "auto") -> dict[str, Any]:
    """Bandwidth in GB/s, products in GFLOP/s (int8: GOP/s; 0 where the level has no such instruction). Of bfloat16
    weights the faster of ``bf16`` and ``f32`` is the limit: bfloat16 widens to float32 without loss."""
    from octavo import kernels

    provider = current_platform().kernel_provider
    if provider != "native":
        raise UnsupportedError("octavo bench roofline measures with the native kernels, and they are not in use here")
    kernels.select(provider)
    from octavo.kernels import limits

    num_bytes = step_bytes(resolve_model(model), dtype, quantization, as_kept=True) // _PAGE * _PAGE
    return {
        "model": model,
        "dtype": dtype,
        "buffer_bytes": num_bytes,
        "bandwidth_gb_s": limits.measure_bandwidth(num_bytes) / 1e9,
        "bf16_gflop_s": limits.measure_bf16() / 1e9,
        "f32_gflop_s": limits.measure_f32() / 1e9,
        "int8_gop_s": limits.measure_int8() / 1e9,
        "kernels": kernels.kernel_set(),
        "threads": current_platform().facts().num_threads,
    }


def step_bytes(path: Path, dtype: str, quantization: str = "auto", *, as_kept: bool = False) -> int:
    """Bytes of weights that a step over few rows reads: all but an embedding that is not the head, too. Quantized ones
    count as the checkpoint has them, those that ``quantization`` makes so as they become, the others as ``dtype``, or
    ``as_kept`` by the chosen kernels."""
    target = QUANTIZED_WHILE_LOADING.get(quantization)
    sizes = {tensor.name: _bytes_of(tensor, dtype, target, as_kept) for tensor in iterate_tensors(path)}
    tied = read_model_facts(path).hf_config["tie_word_embeddings"]
    unread = {_HEAD} if tied else set(_EMBEDDINGS)
    return sum(size for name, size in sizes.items() if name not in unread)


def _bytes_of(tensor: CheckpointTensor, dtype: str, target: str | None, as_kept: bool) -> int:
    if tensor.is_quantized:
        return tensor.num_bytes
    matrix = len(tensor.shape) == 2
    if target is None or not matrix or tensor.name in (_HEAD, *_EMBEDDINGS):
        if not matrix or not as_kept:
            return math.prod(tensor.shape) * _ITEM_BYTES[dtype]
        import torch

        from octavo import kernels

        return kernels.filled_bytes((tensor.shape[0], tensor.shape[1]), getattr(torch, dtype))
    kind = readable_type(target)
    return tensor.shape[0] * -(-tensor.shape[1] // kind.block_size) * kind.block_bytes
