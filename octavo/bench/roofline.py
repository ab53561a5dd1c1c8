"""``octavo bench roofline``: how fast this machine reads as many bytes as a model has, and how fast it multiplies."""

import math
from pathlib import Path
from typing import Any

from octavo.checkpoints import iterate_tensors, read_model_facts, resolve_model
from octavo.errors import UnsupportedError
from octavo.platforms import current_platform

__all__ = ["measure_roofline", "step_bytes"]

_PAGE = 4096
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_EMBEDDINGS, _HEAD = ("model.embed_tokens.weight", "gpt_neox.embed_in.weight"), "lm_head.weight"


def measure_roofline(model: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """Bandwidth in GB/s, products in GFLOP/s (int8: GOP/s; 0 where the level has no such instruction). Of bfloat16
    weights the faster of ``bf16`` and ``f32`` is the limit: bfloat16 widens to float32 without loss."""
    from octavo import kernels

    provider = current_platform().kernel_provider
    if provider != "native":
        raise UnsupportedError("octavo bench roofline measures with the native kernels, and they are not in use here")
    kernels.select(provider)
    from octavo.kernels import limits

    num_bytes = step_bytes(resolve_model(model), dtype) // _PAGE * _PAGE
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


def step_bytes(path: Path, dtype: str) -> int:
    """Bytes of weights that a step over few rows reads: all but an embedding that is not the head, too. Quantized ones
    count as the checkpoint has them, the others as ``dtype``."""
    sizes = {
        tensor.name: tensor.num_bytes if tensor.is_quantized else math.prod(tensor.shape) * _ITEM_BYTES[dtype]
        for tensor in iterate_tensors(path)
    }
    tied = read_model_facts(path).hf_config["tie_word_embeddings"]
    unread = {_HEAD} if tied else set(_EMBEDDINGS)
    return sum(size for name, size in sizes.items() if name not in unread)
