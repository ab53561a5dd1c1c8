"""Bad words as token ids: the sequences whose last token the sampler must not choose after the others.

A word can begin a text or a line, and it can come after a space; mostly these are other tokens.
"""

from octavo.engine.prompts import refuse, shown
from octavo.tokenizers import Tokenizer

__all__ = ["encode_bad_words"]


def encode_bad_words(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The sequences for ``words``, one or two each.

    Raises:
        RequestError: a word has no tokens.
    """
    sequences: list[list[int]] = []
    for word in words:
        bare = word.lstrip(" ") or word
        plain = tokenizer.encode(bare, add_special_tokens=False)
        spaced = tokenizer.encode(" " + bare, add_special_tokens=False)
        if not plain or not spaced:
            refuse("bad_words", f"bad_words: the text {shown(word)} has no tokens; leave it out")
        sequences.append(plain)
        # Where the space is a token before the same ones, or the tokenizer drops it, the first sequence covers this.
        # The two may have different numbers of tokens: "un|believ|able" may be " unbeliev|able" after a space.
        if spaced[-len(plain) :] != plain:
            sequences.append(spaced)
    return sequences
