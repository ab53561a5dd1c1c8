"""Tokenizer: what the rest of octavo knows of one. Thread-safe: nothing of it changes once it is loaded.

Encoding may take long for long texts; it lets other threads run meanwhile, and belongs off the event loop.
"""

import re
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property

import tokenizers

from octavo.errors import CheckpointError, UnsupportedError
from octavo.tokenizers.encoding import encode
from octavo.tokenizers.fill_in_middle import FillInMiddle, find_fill_in_middle
from octavo.tokenizers.protected import ProtectedEncoder
from octavo.tokenizers.token_table import TokenTable

__all__ = ["Tokenizer"]

_SEARCHED_CHARS = 1 << 14

# Forty times the largest vocabularies in use. Others size tables by it.
_MAX_VOCAB_SIZE = 1 << 24


class Tokenizer:
    """A loaded tokenizer.

    Args:
        backend: the library's tokenizer; it is not to be changed afterwards.
        named_tokens: special tokens by their role (``"bos_token"``, ``"eos_token"``, …), as chat templates see them.
        special_tokens: text of every special token.
        chat_template: Jinja source, where the checkpoint has one.
        file: where it came from, for messages.
        fill_in_middle: prefix, suffix and middle token, where the checkpoint says which they are.

    Attributes:
        named_tokens, special_tokens, chat_template, file: as given.
        vocab_size: largest id + 1. The model's logits may be wider.
        token_table: what each id adds to text.
        fill_in_middle: the tokens that ask for the text between two others; None: the vocabulary has none.

    Raises:
        CheckpointError: there are no tokens, or ids beyond every vocabulary.
        UnsupportedError: the decoder cannot be followed token by token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: dict[str, str],
        special_tokens: frozenset[str],
        chat_template: str | None,
        file: str,
        fill_in_middle: tuple[str, str, str | None] | None = None,
    ) -> None:
        # A prompt is never cut and never padded, whatever the file was saved with.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.named_tokens = named_tokens
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        self.file = file
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocab_size <= _MAX_VOCAB_SIZE:
            message = f"token ids must be 0 to {_MAX_VOCAB_SIZE - 1} at most, the largest is {self.vocab_size - 1}"
            raise CheckpointError(message, file=file)
        self.token_table = TokenTable(backend, special_tokens)
        self.fill_in_middle: FillInMiddle | None = find_fill_in_middle(backend.token_to_id, fill_in_middle)
        self._protected: ProtectedEncoder | None = None
        self._protected_lock = threading.Lock()

    @property
    def bos_token(self) -> str | None:
        return self.named_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.named_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        eos_token = self.eos_token
        return None if eos_token is None else self._backend.token_to_id(eos_token)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out when special tokens are skipped."""
        found = (self._backend.token_to_id(token) for token in self.special_tokens)
        return frozenset(token_id for token_id in found if token_id is not None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; the names of special tokens in it count as these tokens.

        Args:
            add_special_tokens: add what the checkpoint puts around a text (mostly a beginning-of-sequence token).

        Raises:
            CheckpointError: the file is damaged so that it cannot encode this text.
        """
        return encode(self._backend, text, add_special_tokens, self.file)

    def encode_fill_in_middle(self, prefix: str, suffix: str) -> list[int]:
        """Token ids of the prompt for what stands between two texts; begun as any text is.

        Raises:
            UnsupportedError: the vocabulary has no tokens for it.
        """
        if self.fill_in_middle is None:
            raise UnsupportedError(f"{self.file}: the vocabulary has no tokens for filling in the middle of a text")
        parts = [self.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
        begin = self.encode("")[:1]
        if begin == [self.eos_token_id] and self.eos_token != self.bos_token:
            begin = []  # it is put after a text
        return [*begin, *self.fill_in_middle.arrange(*parts)]

    def encode_rendered(self, text: str, written: Sequence[tuple[int, int]] | None = None) -> list[int]:
        """Token ids of a text that a chat template rendered; nothing is put around it.

        Args:
            written: spans of ``text`` that count as special tokens, in order; the same names elsewhere are plain text.
                None: all names of special tokens count.
        """
        if written is None:
            return self.encode(text, add_special_tokens=False)
        with self._protected_lock:
            if self._protected is None:
                self._protected = ProtectedEncoder(self._backend, self.special_tokens, self.file)
        return self._protected.encode(text, written)

    def find_special(self, text: str) -> list[tuple[int, int]]:
        """Where the names of special tokens stand in ``text``, as spans in order."""
        pattern = self._special_pattern
        if pattern is None:
            return []
        longest = max(map(len, self.special_tokens))
        spans: list[tuple[int, int]] = []
        begin = 0
        # Window by window: a search holds up every other thread, and some texts make it slow.
        while begin < len(text):
            end = begin + _SEARCHED_CHARS
            for found in pattern.finditer(text, begin, end + longest - 1):
                if found.start() >= end:
                    break
                spans.append(found.span())
                begin = found.end()
            begin = max(begin, end)
        return spans

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids without a token add nothing. Lets other threads run meanwhile."""
        # Of the library's ways to decode, only the batched one lets them.
        (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def decode_token(self, token_id: int) -> str:
        """What the token adds to a text that has begun, special or not; U+FFFD for parts of characters."""
        piece = self.token_table[token_id]
        if piece is None:
            return ""
        return piece.raw.decode("utf-8", "replace") if piece.text is None else piece.text

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary spells it, which is no text; "" for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        longest_first = sorted(filter(None, self.special_tokens), key=lambda token: (-len(token), token))
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
