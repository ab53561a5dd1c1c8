"""The attention layer: knows its heads and its window, finds the batch in the forward context and its KV by binding."""

from torch import Tensor, nn

from octavo.attention.backend import attention_backend
from octavo.attention.forward_context import get_forward_context
from octavo.types import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

__all__ = ["Attention", "attention_layers"]


class Attention(nn.Module):
    """Args:

    name: unique in the model; key of the forward context and of the KV cache config.
    scale: factor of the scores.
    sliding_window: positions that a token looks at, its own included; None: all.
    logits_soft_cap: squeezes the scores smoothly into ± this; None: they are left.
    sinks: [num_heads] float32, a score for each head that takes its share of the softmax and adds nothing.
    """

    def __init__(
        self,
        name: str,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = scale
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.sinks = sinks
        self.backend = attention_backend()
        self._spec: KVCacheSpec | None = None
        self._kv_cache: Tensor | None = None

    def kv_cache_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        """What the layer keeps for a token, in the data type that a resolved ``--kv-cache-dtype`` names. The cache that
        is bound later must have been made for the last answer."""
        if self.sliding_window is None:
            self._spec = FullAttentionSpec(
                block_size=block_size, num_kv_heads=self.num_kv_heads, head_size=self.head_size, dtype=dtype
            )
        else:
            self._spec = SlidingWindowSpec(
                block_size=block_size,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                dtype=dtype,
                sliding_window=self.sliding_window,
            )
        return self._spec

    def bind_kv_cache(self, raw: Tensor) -> None:
        """Uses ``raw`` ([num_blocks × page_size_bytes] uint8) as the layer's KV cache."""
        if self._spec is None:
            raise RuntimeError(f"{self.name}: kv_cache_spec() comes before bind_kv_cache()")
        if raw.ndim != 1 or raw.numel() % self._spec.page_size_bytes:
            raise ValueError(
                f"{self.name}: a KV cache of shape {tuple(raw.shape)} is not whole blocks of "
                f"{self._spec.page_size_bytes} bytes"
            )
        self._kv_cache = self.backend.view(raw, self._spec)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, cos_sin: Tensor | None = None
    ) -> Tensor:
        """Rotates query and key where there is a table, keeps key and value, and attends.

        Args:
            query: [num_tokens, num_heads, head_size], or flat: [num_tokens, num_heads × head_size].
            key, value: [num_tokens, num_kv_heads, head_size], or flat.
            positions: [num_tokens] int64, rows of the table.
            cos_sin: a RotaryEmbedding's table; None: nothing is rotated.

        Returns:
            [num_tokens, num_heads × head_size].
        """
        if self._kv_cache is None:
            raise RuntimeError(f"{self.name}: no KV cache is bound")
        output = self.backend.forward(
            query.view(-1, self.num_heads, self.head_size),
            key.view(-1, self.num_kv_heads, self.head_size),
            value.view(-1, self.num_kv_heads, self.head_size),
            positions,
            cos_sin,
            self._kv_cache,
            get_forward_context()[self.name],
            self.scale,
            self.sliding_window,
            self.logits_soft_cap,
            self.sinks,
        )
        return output.view(-1, self.num_heads * self.head_size)


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """The model's attention layers by name, in the model's order."""
    return {module.name: module for module in model.modules() if isinstance(module, Attention)}
