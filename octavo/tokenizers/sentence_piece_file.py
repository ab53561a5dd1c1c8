"""Reads a SentencePiece model file (mostly ``tokenizer.model``): a protocol buffer of pieces with scores.

Only what a tokenizer needs is read. Every length is checked against the bytes that are left.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import tokenizers

from octavo.errors import CheckpointError, UnsupportedError
from octavo.logging import one_line
from octavo.tokenizers.sentence_piece import SentencePieces, TokenType, build_bpe, build_unigram, first_repeated

__all__ = ["SentencePieceFile"]

_MAX_BYTES = 1 << 28  # thirty times the largest in use
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
# Message: field → number.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _SPACE_AS_SUFFIX = 3, 24
_NAMED_IDS = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2), "pad_token": (43, -1)}
_CHARSMAP, _SPACE_PREFIX, _SINGLE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5
_UNIGRAM, _BPE = 1, 2
_MODEL_TYPES = {3: "word", 4: "char"}

_Value = int | float | memoryview
_Message = dict[int, _Value]


class SentencePieceFile:
    """A model file's contents.

    Args:
        path: the file.

    Attributes:
        tokens, types: by id.
        named_tokens: special tokens by their role.
        is_bpe: merges pieces by score; else it is a unigram model.

    Raises:
        CheckpointError: missing, truncated or malformed.
        UnsupportedError: a kind of model that is no language model's.
    """

    def __init__(self, path: Path) -> None:
        self._file = str(path)
        pieces, trainer, normalizer = self._parse(path)
        self.tokens = [text for text, _, _ in pieces]
        self._scores = [score for _, score, _ in pieces]
        self.types = [kind for _, _, kind in pieces]
        repeated = first_repeated(self.tokens)
        if not self.tokens or repeated is not None:
            raise self._wrong(repeated or "there are no pieces")
        self.named_tokens = self._named_tokens(trainer)
        model_type = trainer.get(_MODEL_TYPE, _UNIGRAM)
        if model_type not in (_UNIGRAM, _BPE):
            kind = _MODEL_TYPES.get(int(model_type) if isinstance(model_type, int) else 0, "unknown")
            raise UnsupportedError(f"{path}: a SentencePiece model of type {kind}; octavo reads unigram and bpe")
        if trainer.get(_SPACE_AS_SUFFIX) or not normalizer.get(_ESCAPE_SPACES, 1):
            raise UnsupportedError(f"{path}: spaces after words, or as they are, are not supported in pieces")
        self.is_bpe = model_type == _BPE
        self._normalizer = normalizer

    def build(self, prefix_once: bool) -> tokenizers.Tokenizer:
        """The tokenizer, without its special tokens; ``prefix_once`` as in SentencePieces."""
        charsmap = self._normalizer.get(_CHARSMAP, b"")
        pieces = SentencePieces(
            tokens=self.tokens,
            scores=self._scores,
            types=self.types,
            unknown=self.named_tokens.get("unk_token"),
            file=self._file,
            space_prefix=bool(self._normalizer.get(_SPACE_PREFIX, 1)),
            prefix_once=prefix_once,
            single_spaces=bool(self._normalizer.get(_SINGLE_SPACES, 1)),
            charsmap=bytes(charsmap) if isinstance(charsmap, memoryview) else b"",
        )
        return build_bpe(pieces) if self.is_bpe else build_unigram(pieces)

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"malformed SentencePiece model: {what}", file=self._file)

    def _parse(self, path: Path) -> tuple[list[tuple[str, float, int]], _Message, _Message]:
        """(pieces as (text, score, type), trainer's settings, normalizer's settings)."""
        try:
            data = path.read_bytes() if path.stat().st_size <= _MAX_BYTES else None
        except OSError as error:
            raise CheckpointError(f"cannot be read: {one_line(str(error))}", file=self._file) from error
        if data is None:
            raise self._wrong(f"more than {_MAX_BYTES} bytes")
        pieces: list[tuple[str, float, int]] = []
        messages: dict[int, _Message] = {_TRAINER: {}, _NORMALIZER: {}}
        try:
            for number, value in _fields(memoryview(data)):
                if number == _PIECES:
                    pieces.append(_piece(_message(value)))
                elif number in messages:
                    messages[number] |= _message(value)
        except ValueError as error:  # also text that is not UTF-8
            raise self._wrong(one_line(str(error))) from error
        return pieces, messages[_TRAINER], messages[_NORMALIZER]

    def _named_tokens(self, trainer: _Message) -> dict[str, str]:
        found = {}
        for name, (number, default) in _NAMED_IDS.items():
            token_id = trainer.get(number, default)
            token_id = token_id - (1 << 64) if isinstance(token_id, int) and token_id >> 63 else token_id
            if not isinstance(token_id, int) or token_id >= len(self.tokens):
                raise self._wrong(f"{name} has id {token_id}, but there are {len(self.tokens)} pieces")
            if token_id >= 0:
                found[name] = self.tokens[token_id]
        return found


def _piece(message: _Message) -> tuple[str, float, int]:
    text, score, kind = message.get(_PIECE_TEXT), message.get(_PIECE_SCORE, 0.0), message.get(_PIECE_TYPE, 1)
    if not isinstance(text, memoryview) or not isinstance(score, float) or kind not in list(TokenType):
        raise ValueError("a piece without text, or with a score or a type that is none")
    return str(text, "utf-8"), score, int(kind)


def _message(value: _Value) -> _Message:
    """A message's last value of each field."""
    if not isinstance(value, memoryview):
        raise ValueError("a number where a message is expected")
    return dict(_fields(value))


def _fields(data: memoryview) -> Iterator[tuple[int, _Value]]:
    """(field number, value) of a message, in order. Raises ValueError where it is malformed."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            length, position = _varint(data, position)
        elif kind in _FIXED_BYTES:
            length = _FIXED_BYTES[kind]
        else:
            raise ValueError(f"wire type {kind} at byte {position}")
        end = position + length
        if end > len(data):
            raise ValueError(f"truncated: {length} bytes needed, {len(data) - position} are left")
        raw = data[position:end]
        yield tag >> 3, struct.unpack("<f", raw)[0] if kind == _FIXED32 else raw
        position = end


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """(value, position after it)."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise ValueError("truncated: a number is cut off")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & ((1 << 64) - 1), position
    raise ValueError(f"a number of more than ten bytes before byte {position}")
