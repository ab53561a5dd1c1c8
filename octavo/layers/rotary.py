"""Rotary position embedding with its table made once, and the scalings that stretch a model's context.

A scaling whose frequencies depend on the length of the sequence at hand ("dynamic") has no such table, and would make
cached KV wrong when the sequence grows: it is refused. "longrope" has two sets of frequencies, for short and for long
sequences; here the longest that may come decides for all, so that a token's key never changes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ModelError, UnsupportedError
from octavo.logging import init_logger

__all__ = ["RotaryEmbedding"]

logger = init_logger(__name__)

Scaling = Mapping[str, Any]
_MAX_TABLE_BYTES = 1 << 30
# (frequencies, scaling, rope_theta, max_position) → (frequencies, factor of the cosines and sines)
ScalingRule = Callable[[Tensor, Scaling, float, int], tuple[Tensor, float]]


class RotaryEmbedding(nn.Module):
    """Holds the table, which attention layers rotate by.

    Args:
        rotary_dim: channels of a head that are rotated, the first ones.
        max_position: rows of the table: positions are below it.
        theta: base of the frequencies.
        scaling: ``rope_scaling`` of a Hugging Face config, checked and completed by the checkpoints room.
        freq_factors: divisors of the rotary_dim/2 frequencies (a GGUF file's ``rope_freqs.weight``).

    Attributes:
        cos_sin: [max_position, rotary_dim] float32, the cosines of a position's angles, then their sines.
    """

    cos_sin: Tensor

    def __init__(
        self,
        rotary_dim: int,
        max_position: int,
        theta: float,
        scaling: Scaling | None = None,
        freq_factors: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        table_bytes = max_position * rotary_dim * 4
        if table_bytes > _MAX_TABLE_BYTES:
            raise ModelError(
                f"a rotary table for {max_position} positions takes {table_bytes / 2**30:.1f} GiB, more than the "
                f"{_MAX_TABLE_BYTES / 2**30:.0f} GiB that octavo gives it; lower --max-model-len"
            )
        # float32 throughout: that is what the models were trained with.
        frequencies = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
        frequencies, magnitude = _rule(scaling)(frequencies, scaling or {}, theta, max_position)
        if freq_factors is not None:
            frequencies = frequencies / torch.tensor(freq_factors, dtype=torch.float32)
        self.register_buffer("cos_sin", _table(frequencies, max_position, magnitude), persistent=False)


def _table(frequencies: Tensor, max_position: int, magnitude: float) -> Tensor:
    """[max_position, 2 * frequencies]: cosines, then sines."""
    try:
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        # Written in place: of 131,072 positions of 256 channels the table alone takes 128 MiB.
        half = len(frequencies)
        table = torch.empty(max_position, 2 * half, dtype=torch.float32)
        torch.cos(angles, out=table[:, :half])
        torch.sin(angles, out=table[:, half:])
        return table if magnitude == 1.0 else table.mul_(magnitude)
    except RuntimeError as error:  # torch has no class of its own for memory that is not there
        if "allocate memory" not in str(error):
            raise
        raise ModelError(
            f"a rotary table for {max_position} positions does not fit into memory; lower --max-model-len"
        ) from error


def _rule(scaling: Scaling | None) -> ScalingRule:
    kind = "default" if scaling is None else scaling["rope_type"]
    rule = _RULES.get(kind)
    if rule is None:
        raise UnsupportedError(f"rope_scaling type {kind!r} is not supported; supported: {', '.join(sorted(_RULES))}")
    return rule


def _default(frequencies: Tensor, scaling: Scaling, theta: float, max_position: int) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, scaling: Scaling, theta: float, max_position: int) -> tuple[Tensor, float]:
    """Positions divided by the factor."""
    return frequencies / scaling["factor"], 1.0


def _llama3(frequencies: Tensor, scaling: Scaling, theta: float, max_position: int) -> tuple[Tensor, float]:
    """Long waves are stretched, short ones kept, those between blended by how often they fit the old context."""
    old_context = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = old_context * frequencies / (2 * math.pi)  # in the old context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * kept + frequencies / scaling["factor"] * (1.0 - kept), 1.0


def _yarn(frequencies: Tensor, scaling: Scaling, theta: float, max_position: int) -> tuple[Tensor, float]:
    """Channels that turn more than beta_fast times in the old context are kept, those that turn less than beta_slow
    times are stretched, with a linear ramp over the channels between; scores grow by the attention factor."""
    factor = scaling["factor"]
    old_context = scaling["original_max_position_embeddings"]
    half = len(frequencies)

    def channel(turns: float) -> float:
        """Channel (not whole) that turns so many times in the old context."""
        return half * math.log(old_context / (turns * 2 * math.pi)) / math.log(theta)

    first = channel(scaling["beta_fast"])
    last = channel(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - first) / (max(last - first, 0.001))
    stretched = ramp.clamp(0.0, 1.0)
    return frequencies / factor * stretched + frequencies * (1.0 - stretched), _yarn_magnitude(scaling, factor)


def _yarn_magnitude(scaling: Scaling, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def _longrope(frequencies: Tensor, scaling: Scaling, theta: float, max_position: int) -> tuple[Tensor, float]:
    """Each frequency divided by a factor of its own, from one of two lists."""
    old_context = scaling["original_max_position_embeddings"]
    kind = "short" if max_position <= old_context else "long"
    factors = scaling[f"{kind}_factor"]
    if len(factors) != len(frequencies):
        raise ModelError(f"rope_scaling.{kind}_factor has {len(factors)} numbers, expected {len(frequencies)}")
    logger.info(
        "longrope: the %s factors for every sequence: max_model_len is %d, the original context %d",
        kind,
        max_position,
        old_context,
    )
    return frequencies / torch.tensor(factors, dtype=torch.float32), float(scaling["attention_factor"])


_RULES: dict[str, ScalingRule] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
