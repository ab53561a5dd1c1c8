"""Tokens that ask a model for the text between two others: which ones a vocabulary has, and in what order they go.

Most models read prefix, suffix, then write the middle; some were trained with the suffix first, some need no third
token. The order is a fact of the model that its tokens' names tell.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["FillInMiddle", "find_fill_in_middle"]


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """Attributes:

    prefix, suffix: ids of the tokens before the two parts.
    middle: id of the token after which the model writes; None: it writes after the second part.
    suffix_first: the suffix goes before the prefix.
    """

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool = False

    def arrange(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """The prompt for what stands between two texts, given as token ids; nothing is put before it."""
        parts = [[self.prefix, *prefix], [self.suffix, *suffix]]
        if self.suffix_first:
            parts.reverse()
        return [*parts[0], *parts[1], *([] if self.middle is None else [self.middle])]


# (prefix, suffix, middle, suffix first), as published with the models.
_KNOWN: tuple[tuple[str, str, str | None, bool], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", False),  # Qwen, Granite 4, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", False),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", False),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", False),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>", False),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>", False),
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", True),  # Seed-Coder
    ("[PREFIX]", "[SUFFIX]", None, True),  # Codestral; its [MIDDLE] is not used
)
# Of those, the ones whose order is not the usual one, by the prefix token.
_SUFFIX_FIRST = {prefix: middle for prefix, _, middle, suffix_first in _KNOWN if suffix_first}


def find_fill_in_middle(
    id_of: Callable[[str], int | None], stated: tuple[str, str, str | None] | None = None
) -> FillInMiddle | None:
    """The tokens of a vocabulary, or None where it has none.

    Args:
        id_of: token → id, None where there is none.
        stated: prefix, suffix and middle token, where the checkpoint says which.
    """
    for prefix, suffix, middle, suffix_first in _KNOWN if stated is None else (_in_order(*stated),):
        prefix_id, suffix_id = id_of(prefix), id_of(suffix)
        middle_id = None if middle is None else id_of(middle)
        if prefix_id is not None and suffix_id is not None and (middle is None or middle_id is not None):
            return FillInMiddle(prefix_id, suffix_id, middle_id, suffix_first)
    return None


def _in_order(prefix: str, suffix: str, middle: str | None) -> tuple[str, str, str | None, bool]:
    if prefix in _SUFFIX_FIRST:
        return prefix, suffix, _SUFFIX_FIRST[prefix], True
    return prefix, suffix, middle, False
