"""SentencePiece vocabularies, from whichever file, as tokenizers: BPE by scores, and unigram.

SentencePiece writes spaces as "▁", mostly puts one before a text, and spells what it has no piece for as byte tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from octavo.errors import CheckpointError

__all__ = ["MAX_TOKEN_LENGTH", "SPACE", "SentencePieces", "TokenType", "build_bpe", "build_unigram", "first_repeated"]

SPACE = "▁"
# Some ten times the longest there is. Finding a token's merges takes the square of its length.
MAX_TOKEN_LENGTH = 4096
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


class TokenType(IntEnum):
    """SentencePiece's kinds of pieces; GGUF has taken over the numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """Attributes:

    tokens, scores, types: by id; every token once.
    unknown: the token for what has no other; None: no text needs it.
    file: where they came from, for messages.
    space_prefix: a text begins with a space that decoding takes away.
    prefix_once: not every part between special tokens does, only the whole text.
    single_spaces: spaces at the ends are dropped, and so are repeated ones.
    charsmap: a compiled table of characters that are replaced first; b"": none.
    """

    tokens: list[str]
    scores: Sequence[float]
    types: Sequence[int]
    unknown: str | None
    file: str
    space_prefix: bool
    prefix_once: bool = False
    single_spaces: bool = False
    charsmap: bytes = b""


def first_repeated(tokens: list[str]) -> str | None:
    """What is wrong with the list, if a token stands twice in it."""
    first: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if first.setdefault(token, index) != index:
            return f"has {token!r} twice: ids {first[token]} and {index}"
    return None


def build_bpe(pieces: SentencePieces) -> tokenizers.Tokenizer:
    """Merges pieces, the best score first. Raises CheckpointError where some text would have no tokens."""
    vocab = _checked_vocab(pieces)
    missing = next((token for token in _BYTE_TOKENS if token not in vocab), None)
    if missing is not None and pieces.unknown is None:
        message = f"the vocabulary has no byte token {missing} and no unknown token: some text has no tokens"
        raise CheckpointError(message, file=pieces.file)
    model = models.BPE(
        vocab, _merges_of_scores(pieces, vocab), unk_token=pieces.unknown, fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    _set_text_form(backend, pieces)
    return backend


def build_unigram(pieces: SentencePieces) -> tokenizers.Tokenizer:
    """Takes the most probable pieces. Raises CheckpointError where there is no unknown token."""
    vocab = _checked_vocab(pieces)
    if pieces.unknown is None:
        raise CheckpointError("a unigram vocabulary needs an unknown token", file=pieces.file)
    byte_fallback = all(token in vocab for token in _BYTE_TOKENS)
    scored = [(token, float(score)) for token, score in zip(pieces.tokens, pieces.scores, strict=True)]
    backend = tokenizers.Tokenizer(models.Unigram(scored, vocab[pieces.unknown], byte_fallback))
    _set_text_form(backend, pieces)
    if byte_fallback:
        # The library would find byte tokens in a text that has their names.
        names_cut = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "isolated")
        before = backend.pre_tokenizer
        backend.pre_tokenizer = names_cut if before is None else pre_tokenizers.Sequence([before, names_cut])
    return backend


def _checked_vocab(pieces: SentencePieces) -> dict[str, int]:
    if not all(isinstance(score, float | int) and math.isfinite(score) for score in pieces.scores):
        raise CheckpointError("scores must hold numbers only", file=pieces.file)
    longest = max(pieces.tokens, key=len, default="")
    if len(longest) > MAX_TOKEN_LENGTH:
        message = f"a token of {len(longest)} characters, at most {MAX_TOKEN_LENGTH} are expected"
        raise CheckpointError(message, file=pieces.file)
    return {token: index for index, token in enumerate(pieces.tokens)}


def _merges_of_scores(pieces: SentencePieces, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: two pieces may merge where they make another one, the best score first.

    Of equal scores, as runs of spaces have, that of the longest first part goes first: so a run grows from the left.
    """
    scores, tokens = pieces.scores, pieces.tokens
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED)
    ids = [index for index, kind in enumerate(pieces.types) if kind in mergeable and len(tokens[index]) > 1]
    merges: list[tuple[str, str]] = []
    for _, of_a_score in groupby(sorted(ids, key=lambda index: -scores[index]), key=scores.__getitem__):
        found = []
        for index in of_a_score:
            token = tokens[index]
            for cut in range(1, len(token)):
                left = token[:cut]
                if left in vocab and (right := token[cut:]) in vocab:
                    found.append((-cut, cut - len(token), index, left, right))
        found.sort()
        merges += [(left, right) for _, _, _, left, right in found]
    return merges


def _set_text_form(backend: tokenizers.Tokenizer, pieces: SentencePieces) -> None:
    """How text is written in pieces, and pieces as text."""
    steps: list[normalizers.Normalizer] = []
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.single_spaces:
        # In this order, each looks at a space once, however long the run is.
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
    if pieces.space_prefix and pieces.prefix_once:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    elif pieces.space_prefix:
        steps.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    from_pieces: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.space_prefix:
        from_pieces.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(from_pieces)
