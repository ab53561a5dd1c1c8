"""Random text of an exact number of tokens: words that are one token each, wherever they stand."""

import random
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.tokenizers import Tokenizer

__all__ = ["RandomText"]

_ENOUGH_WORDS = 2000
_TRIES = 8


class RandomText:
    """Args:

    tokenizer: what the text is counted with, special tokens that it adds included.
    draw: the source of chance.
    """

    def __init__(self, tokenizer: "Tokenizer", draw: random.Random) -> None:
        self._tokenizer = tokenizer
        self._draw = draw
        self._num_added = len(tokenizer.encode(""))
        self._words = self._find_words()

    def _find_words(self) -> list[int]:
        """Ids whose text is a space and letters, and which that text is encoded to: most tokenizers split before
        spaces, so that such words do not merge."""
        tokenizer, found = self._tokenizer, []
        special = tokenizer.special_token_ids
        for token_id in self._draw.sample(range(tokenizer.vocab_size), tokenizer.vocab_size):
            text = "" if token_id in special else tokenizer.decode_token(token_id)
            if text.startswith(" ") and text[1:].isalpha() and text.isascii():
                pair = tokenizer.encode(text * 2, add_special_tokens=False)
                if pair.count(token_id) == 2:
                    found.append(token_id)
                    if len(found) == _ENOUGH_WORDS:
                        break
        if not found:
            raise ConfigError("the tokenizer has no words of one token to make text of; give --tokenizer another one")
        return found

    def words(self, count: int) -> list[int]:
        return self._draw.choices(self._words, k=count)

    def prompt(self, beginning: list[int], num_tokens: int) -> str:
        """Begins with these words, and is ``num_tokens`` tokens."""
        num_words = num_tokens - self._num_added
        for _ in range(_TRIES):
            # Some tokenizers put a space of their own before the first word.
            ids = beginning + self.words(max(num_words - len(beginning), 0))
            text = self._tokenizer.decode(ids[: max(num_words, 0)])
            found = len(self._tokenizer.encode(text))
            if text and found == num_tokens:
                return text
            num_words += num_tokens - found
        raise ConfigError(f"no text of exactly {num_tokens} tokens could be made with this tokenizer")
