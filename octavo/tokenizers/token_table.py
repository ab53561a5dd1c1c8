"""What each token id adds to the text, worked out when it is first met and kept for all requests of the process."""

import json
from dataclasses import dataclass

import tokenizers

from octavo.tokenizers.decoder import DecoderPlan, Join, byte_fallback_value, byte_level_bytes, plan_decoder

__all__ = ["TokenPiece", "TokenTable"]


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token's part of the text.

    Attributes:
        text: the part, where it is whole characters; None: its bytes are only parts of some.
        raw: the bytes, where text is joined from bytes.
        special: left out where special tokens are skipped.
    """

    text: str | None
    raw: bytes
    special: bool


class TokenTable(dict[int, TokenPiece | None]):
    """Token id → what it adds after other tokens; None: there is no such token, and decoding leaves it out.

    Thread-safe: two threads may work out the same entry, with the same result.

    Attributes:
        plan: the decoder's plan.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: frozenset[str]) -> None:
        super().__init__()
        decoder = backend.decoder
        # A decoder's pickled state is its part of tokenizer.json.
        self.plan: DecoderPlan = plan_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        self._special_tokens = special_tokens
        self._id_to_token = backend.id_to_token

    def __missing__(self, token_id: int) -> TokenPiece | None:
        piece = self[token_id] = self._make(token_id, False)
        return piece

    def first_piece(self, token_id: int) -> TokenPiece | None:
        """What the id adds at the very beginning."""
        return self._make(token_id, True)

    def _make(self, token_id: int, first: bool) -> TokenPiece | None:
        token = self._id_to_token(token_id)
        if token is None:
            return None
        special = token in self._special_tokens
        part = self.plan.prepare(token, first)
        if self.plan.join is Join.BYTE_LEVEL:
            raw = byte_level_bytes(part)
            try:
                return TokenPiece(raw.decode("utf-8"), raw, special)
            except UnicodeDecodeError:
                return TokenPiece(None, raw, special)
        if self.plan.join is Join.BYTE_FALLBACK:
            value = byte_fallback_value(part)
            if value is not None:
                return TokenPiece(None, bytes([value]), special)
            part = self.plan.complete(part, first)
        return TokenPiece(part, b"", special)
