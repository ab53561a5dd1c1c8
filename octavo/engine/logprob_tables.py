"""Logprob tables: what the engine says of a position, with the tokens' texts."""

import itertools

from octavo.tokenizers import Tokenizer
from octavo.types import Logprob, PositionLogprobs

__all__ = ["TokenTexts", "logprob_table"]


class TokenTexts(dict[int, str]):
    """Token id → its text, worked out when first asked for: a table of a whole vocabulary costs a look-up a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._tokenizer.decode_token(token_id)
        return text


def logprob_table(position: PositionLogprobs, texts: TokenTexts | None) -> dict[int, Logprob]:
    """Token id → Logprob, the sampled token (of a prompt: its own) first.

    Args:
        texts: None: without the tokens' texts.
    """
    token_ids = position.token_ids
    ranks = itertools.chain((position.sampled_rank,), position.ranks or itertools.count(1))
    decoded = itertools.repeat(None) if texts is None else map(texts.__getitem__, token_ids)
    # The sampled id may come again among the others, with the same values: it keeps its first place.
    return dict(zip(token_ids, map(Logprob, position.logprobs, ranks, decoded), strict=False))
