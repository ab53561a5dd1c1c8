"""What a tokenizer's decoder does, seen token by token: a plan that the detokenizer can follow incrementally.

A decoder of the Hugging Face library is a chain of steps over the list of all tokens. The chains that language models
use come down to three parts: steps that change each token by itself (or by whether it is the first), one way of
joining the tokens (and more such steps, once bytes have become text), and characters dropped from the beginning of the
text. Any other chain is refused by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tokenizers import Regex, decoders, pre_tokenizers

from octavo.errors import UnsupportedError

__all__ = ["DecoderPlan", "Join", "byte_fallback_value", "byte_level_bytes", "plan_decoder"]

# (token, whether it is the text's first token) → its part of the text.
TokenStep = Callable[[str, bool], str]


class Join(Enum):
    """How the tokens' parts become text."""

    TEXT = "text"  # as they are
    BYTE_LEVEL = "byte-level"  # each token spells bytes in GPT-2's alphabet; all bytes together are UTF-8
    BYTE_FALLBACK = "byte-fallback"  # tokens named <0x00> to <0xFF> are bytes; runs of them are UTF-8


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """A decoder's parts.

    Attributes:
        steps: applied to each token, in order.
        join: how the results are joined.
        later_steps: with BYTE_FALLBACK, applied to each token that is no byte, and to each run of bytes as one token.
        strips: (character, how many of them at most) dropped from the beginning of the text, in order.
    """

    steps: tuple[TokenStep, ...]
    join: Join
    later_steps: tuple[TokenStep, ...] = ()
    strips: tuple[tuple[str, int], ...] = ()

    def prepare(self, token: str, first: bool) -> str:
        """The token's part of the text, before bytes become text."""
        return _apply(self.steps, token, first)

    def complete(self, part: str, first: bool) -> str:
        """What becomes of a part, or of the text of a run of bytes, afterwards."""
        return _apply(self.later_steps, part, first)


def _apply(steps: tuple[TokenStep, ...], token: str, first: bool) -> str:
    for step in steps:
        token = step(token, first)
    return token


def plan_decoder(decoder: dict[str, Any] | None) -> DecoderPlan:
    """Reads a decoder as tokenizer.json holds it.

    Raises:
        UnsupportedError: the decoder cannot be followed token by token; it names the kind.
    """
    if decoder is None:
        return DecoderPlan((_separate_by_spaces,), Join.TEXT)
    steps: list[TokenStep] = []
    later_steps: list[TokenStep] = []
    strips: list[tuple[str, int]] = []
    join = Join.TEXT
    fused = False  # from here on the chain sees the whole text as one token
    for link in _links(decoder):
        kind = link["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "ByteLevel" and not fused and join is Join.TEXT:
            join, fused = Join.BYTE_LEVEL, True
        elif kind == "ByteFallback" and not fused and join is Join.TEXT:
            join = Join.BYTE_FALLBACK
        elif kind == "Strip" and fused and link["stop"] == 0:
            strips.append((link["content"], link["start"]))
        elif kind in _TOKEN_STEPS and not fused and join in (Join.TEXT, Join.BYTE_FALLBACK):
            (steps if join is Join.TEXT else later_steps).append(_TOKEN_STEPS[kind](link))
        else:
            raise _unsupported(kind, decoder)
    return DecoderPlan(tuple(steps), join, tuple(later_steps), tuple(strips))


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a byte-level token spells; a token with other characters in it stands for itself."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def byte_fallback_value(token: str) -> int | None:
    """The byte that a token named like ``<0x0A>`` stands for, else None."""
    if len(token.encode("utf-8")) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    digits = token[3:-1]
    # The library reads the two places with Rust's from_str_radix, which takes a plus sign.
    digits = digits[1:] if digits.startswith("+") else digits
    if not digits or any(digit not in _HEX_DIGITS for digit in digits):
        return None
    return int(digits, 16)


def _links(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The chain without nesting."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [link for part in decoder["decoders"] for link in _links(part)]


def _separate_by_spaces(token: str, first: bool) -> str:
    """What the library does without any decoder."""
    return token if first else " " + token


def _replace(link: dict[str, Any]) -> TokenStep:
    pattern = link["pattern"]
    decoder = decoders.Replace(Regex(pattern["Regex"]) if "Regex" in pattern else pattern["String"], link["content"])
    return lambda token, first: decoder.decode([token])


def _strip(link: dict[str, Any]) -> TokenStep:
    if link["stop"] != 0:
        raise _unsupported("Strip with stop > 0", link)
    decoder = decoders.Strip(link["content"], link["start"], 0)
    return lambda token, first: decoder.decode([token])


def _metaspace(link: dict[str, Any]) -> TokenStep:
    sign, at_first = link["replacement"], " " if link["prepend_scheme"] == "never" else ""
    return lambda token, first: token.replace(sign, at_first if first else " ")


def _word_piece(link: dict[str, Any]) -> TokenStep:
    decoder = decoders.WordPiece(link["prefix"], link["cleanup"])
    # The first token is treated in another way; so a later one is shown with a token before it.
    return lambda token, first: decoder.decode([token]) if first else decoder.decode(["a", token])[1:]


def _unsupported(kind: str, decoder: dict[str, Any]) -> UnsupportedError:
    chain = " → ".join(link["type"] for link in _links(decoder))
    return UnsupportedError(
        f"decoder {kind!r} is not supported in the chain {chain}; supported: ByteLevel, ByteFallback with Fuse and a "
        "left Strip, Replace, Strip, Metaspace, WordPiece"
    )


_TOKEN_STEPS: dict[str, Callable[[dict[str, Any]], TokenStep]] = {
    "Replace": _replace,
    "Strip": _strip,
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
}
_HEX_DIGITS = "0123456789abcdefABCDEF"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_alphabet()
assert set(_BYTE_OF_CHARACTER) == set(pre_tokenizers.ByteLevel.alphabet())
