"""Token ids → text, a token at a time: the pieces add up to what decoding all ids at once gives, for any ids.

A character is given out as soon as no later token can change it, so no replacement character is shown that the whole
text lacks. A push costs the same however long the text is.
"""

from codecs import utf_8_decode

from octavo.tokenizers.decoder import DecoderPlan, Join
from octavo.tokenizers.token_table import TokenPiece
from octavo.tokenizers.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_REPLACEMENT = "\ufffd"


class _ByteLevelBuffer:
    """Holds the bytes of a character that has begun, at most three."""

    __slots__ = ("_held",)

    def __init__(self, plan: DecoderPlan) -> None:
        self._held = b""

    def push(self, piece: TokenPiece) -> str:
        if piece.text is not None and not self._held:
            return piece.text
        text, used = utf_8_decode(self._held + piece.raw, "replace", False)
        self._held = (self._held + piece.raw)[used:]
        return text

    def finish(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


class _ByteFallbackBuffer:
    """Holds a run of byte tokens: if it is not UTF-8 as a whole, each of its bytes is a replacement character.

    So nothing of a run may be shown before it ends, unless it is already beyond repair.
    """

    __slots__ = ("_broken", "_characters", "_complete", "_first", "_length", "_partial")

    def __init__(self, plan: DecoderPlan) -> None:
        self._complete = plan.complete
        self._first = True  # nothing has stood before this run
        self._reset()

    def _reset(self) -> None:
        self._characters: list[str] = []
        self._partial = b""  # the bytes of a character that has begun
        self._length = 0  # bytes in the run
        self._broken = False

    def push(self, piece: TokenPiece) -> str:
        if piece.text is not None:
            text = self.finish() + piece.text if self._length else piece.text
            self._first = False
            return text
        if self._broken:
            return self._replacements(1)
        self._length += 1
        self._partial += piece.raw
        try:
            text, used = utf_8_decode(self._partial, "strict", False)
        except UnicodeDecodeError:
            self._broken = True
            return self._replacements(self._length)
        if used:
            self._characters.append(text)
            self._partial = b""
        return ""

    def finish(self) -> str:
        if self._broken or not self._length:
            text = ""
        elif self._partial:
            text = self._replacements(self._length)
        else:
            text = self._complete("".join(self._characters), self._first)
            self._first = False
        self._reset()
        return text

    def _replacements(self, count: int) -> str:
        """Each counts as a token of its own."""
        text = self._complete(_REPLACEMENT, self._first) + self._complete(_REPLACEMENT, False) * (count - 1)
        self._first = False
        return text


class _TextBuffer:
    """Holds nothing."""

    __slots__ = ()

    def __init__(self, plan: DecoderPlan) -> None:
        pass

    def push(self, piece: TokenPiece) -> str:
        return piece.text or ""

    def finish(self) -> str:
        return ""


_Buffer = _ByteLevelBuffer | _ByteFallbackBuffer | _TextBuffer
_BUFFERS: dict[Join, type[_Buffer]] = {
    Join.BYTE_LEVEL: _ByteLevelBuffer,
    Join.BYTE_FALLBACK: _ByteFallbackBuffer,
    Join.TEXT: _TextBuffer,
}


class IncrementalDetokenizer:
    """The text of one sequence of ids.

    Args:
        tokenizer: whose ids they are.
        skip_special_tokens: leave the text of special tokens out.
        spaces_between_special_tokens: False: a special token right after another is not set apart by a space, even if
            the tokenizer would do so.
    """

    __slots__ = ("_begun", "_buffer", "_join_special", "_last_special", "_skip_special", "_strips", "_table")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._table = tokenizer.token_table
        self._skip_special = skip_special_tokens
        self._join_special = not spaces_between_special_tokens
        self._last_special = False
        self._buffer = _BUFFERS[self._table.plan.join](self._table.plan)
        self._begun = False
        # What is still to be dropped from the beginning, last strip first.
        self._strips = list(reversed(self._table.plan.strips))

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is now certain (often the token's own, sometimes none)."""
        piece = self._table[token_id] if self._begun else self._table.first_piece(token_id)
        if piece is None or (piece.special and self._skip_special):
            return ""
        self._begun = True
        if self._join_special:
            if piece.special and self._last_special:
                piece = self._table.first_piece(token_id) or piece  # at the beginning no tokenizer sets a token apart
            self._last_special = piece.special
        text = self._buffer.push(piece)
        return self._strip(text) if self._strips else text

    def finish(self) -> str:
        """No more tokens come: returns what was held back."""
        text = self._buffer.finish()
        return self._strip(text) if self._strips else text

    def _strip(self, text: str) -> str:
        while self._strips and text:
            character, count = self._strips.pop()
            rest = text.lstrip(character)
            dropped = min(len(text) - len(rest), count)
            if not rest and dropped < count:
                self._strips.append((character, count - dropped))
            text = text[dropped:]
        return text
