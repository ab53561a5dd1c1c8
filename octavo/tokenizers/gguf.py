"""Makes a tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

Takes the metadata as a dict and knows nothing of the file.
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from octavo.errors import CheckpointError, UnsupportedError
from octavo.logging import init_logger
from octavo.tokenizers.gguf_pre_tokenizers import pre_tokenizer_kind
from octavo.tokenizers.post_processor import surround
from octavo.tokenizers.tokenizer import Tokenizer

__all__ = ["build_from_gguf"]

logger = init_logger(__name__)

_PREFIX = "tokenizer.ggml."
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
# Each entry's name, then the one that older files have.
_FILL_IN_MIDDLE = (
    ("fim_pre_token_id", "prefix_token_id"),
    ("fim_suf_token_id", "suffix_token_id"),
    ("fim_mid_token_id", "middle_token_id"),
)
_SPACE = "▁"
# Some ten times the longest there is. Finding a token's merges takes the square of its length.
_MAX_TOKEN_LENGTH = 4096


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_TOKEN_TYPES = tuple(map(int, _TokenType))


class _Metadata:
    """The tokenizer's part of the metadata, checked as it is read."""

    def __init__(self, metadata: dict[str, Any], file: str) -> None:
        self._metadata = metadata
        self.file = file
        self.tokens: list[str] = []
        self.types: list[int] = []

    def read_tokens(self) -> None:
        """Fills in ``tokens`` and ``types``."""
        self.tokens = self._tokens()
        self.types = self._types()

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(message, file=self.file)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """One value; an entry of another type is an error."""
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{_PREFIX}{key} must be of type {kind.__name__}, found {type(value).__name__}")
        return value

    def array(self, key: str, length: int | None = None) -> list[Any] | None:
        """A list, as long as there are tokens where ``length`` says so; None where there is none."""
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return None
        if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
            raise self.error(f"{_PREFIX}{key} must be an array, found {type(value).__name__}")
        found: list[Any] = value.tolist() if hasattr(value, "tolist") else list(value)
        if length is not None and len(found) != length:
            raise self.error(f"{_PREFIX}{key} has {len(found)} entries for {length} tokens")
        return found

    def strings(self, key: str) -> list[str]:
        found = self.array(key)
        if found is None:
            raise self.error(f"{_PREFIX}{key} is missing")
        if not all(isinstance(entry, str) for entry in found):
            raise self.error(f"{_PREFIX}{key} must hold text only")
        return found

    def token(self, key: str) -> str | None:
        """The token whose id is stored under ``key``."""
        token_id: int | None = self.get(key, int)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise self.error(f"{_PREFIX}{key} is {token_id}, but there are {len(self.tokens)} tokens")
        return self.tokens[token_id]

    def _tokens(self) -> list[str]:
        # Files may have nameless tokens; every id needs a name of its own.
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(self.strings("tokens"))]
        if not tokens:
            raise self.error(f"{_PREFIX}tokens is empty")
        longest = max(tokens, key=len)
        if len(longest) > _MAX_TOKEN_LENGTH:
            message = f"{_PREFIX}tokens has one of {len(longest)} characters, at most {_MAX_TOKEN_LENGTH} are expected"
            raise self.error(message)
        if len(set(tokens)) != len(tokens):
            first: dict[str, int] = {}
            for index, token in enumerate(tokens):
                if first.setdefault(token, index) != index:
                    raise self.error(f"{_PREFIX}tokens has {token!r} twice: ids {first[token]} and {index}")
        return tokens

    def _types(self) -> list[int]:
        types = self.array("token_type", len(self.tokens))
        if types is None:
            return [_TokenType.NORMAL] * len(self.tokens)
        unknown = next((kind for kind in types if kind not in _TOKEN_TYPES), None)
        if unknown is not None:
            raise self.error(f"{_PREFIX}token_type must be 1 to 6, found {unknown!r}")
        return types


def build_from_gguf(metadata: dict[str, Any], file: str) -> Tokenizer:
    """The tokenizer that the metadata describe.

    Args:
        file: the file's path, for messages.

    Raises:
        CheckpointError: entries are missing or contradict each other.
        UnsupportedError: a kind of tokenizer that octavo does not have.
    """
    read = _Metadata(metadata, file)
    kind = read.get("model", str)
    if kind is None:
        raise read.error(f"{_PREFIX}model is missing: the file has no tokenizer")
    if kind not in _BUILDERS:
        supported = ", ".join(_BUILDERS)
        raise UnsupportedError(f"tokenizer kind {kind!r} ({_PREFIX}model) is not supported; supported: {supported}")
    read.read_tokens()
    named_tokens = {name: token for name, key in _NAMED_TOKENS.items() if (token := read.token(key)) is not None}
    backend, add_bos = _BUILDERS[kind](read, named_tokens)
    # SentencePiece's space sign is not found in text as it is: merging makes the tokens that have it.
    special_tokens = _add_tokens(backend, read, named_tokens, unless_with=_SPACE if kind == "llama" else None)
    _set_post_processor(backend, read, named_tokens, add_bos)
    chat_template = metadata.get("tokenizer.chat_template")
    if chat_template is not None and not isinstance(chat_template, str):
        raise CheckpointError(f"tokenizer.chat_template must be text, found {type(chat_template).__name__}", file=file)
    return Tokenizer(
        backend,
        named_tokens=named_tokens,
        special_tokens=special_tokens,
        chat_template=chat_template,
        file=file,
        fill_in_middle=_fill_in_middle(read),
    )


def _fill_in_middle(read: _Metadata) -> tuple[str, str, str | None] | None:
    prefix, suffix, middle = (read.token(new) or read.token(old) for new, old in _FILL_IN_MIDDLE)
    return None if prefix is None or suffix is None else (prefix, suffix, middle)


def _build_byte_level(read: _Metadata, named_tokens: dict[str, str]) -> tuple[tokenizers.Tokenizer, bool]:
    """(GPT-2's kind of BPE, whether a text begins with a BOS token if the file does not say)."""
    name = read.get("pre", str)
    if name is None:
        logger.warning("%s: %spre is missing; text is cut in GGUF's default way", read.file, _PREFIX)
    kind = pre_tokenizer_kind(name or "default")
    vocab = {token: index for index, token in enumerate(read.tokens)}
    merges = []
    for merge in read.strings("merges"):
        left, separator, right = merge.partition(" ")
        if not separator or " " in right or left + right not in vocab:
            raise read.error(f"{_PREFIX}merges has {merge!r}: expected two tokens that make a third one")
        merges.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=kind.ignore_merges))
    if kind.compose:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = kind.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, kind.add_bos


def _build_sentence_piece(read: _Metadata, named_tokens: dict[str, str]) -> tuple[tokenizers.Tokenizer, bool]:
    """(SentencePiece's BPE with byte fallback, whether a text begins with a BOS token if the file does not say)."""
    scores = read.array("scores", len(read.tokens))
    if scores is None:
        raise read.error(f"{_PREFIX}scores is missing")
    if not all(isinstance(score, float | int) and not math.isnan(score) for score in scores):
        raise read.error(f"{_PREFIX}scores must hold numbers only")
    vocab = {token: index for index, token in enumerate(read.tokens)}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    missing = next((token for token in byte_tokens if token not in vocab), None)
    unknown = next((t for t, kind in zip(read.tokens, read.types, strict=True) if kind == _TokenType.UNKNOWN), None)
    unknown = named_tokens.get("unk_token", unknown)
    if missing is not None and unknown is None:
        raise read.error(f"the vocabulary has no byte token {missing} and no unknown token: some text has no tokens")
    model = models.BPE(
        vocab, _merges_of_scores(read, vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    from_pieces: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if read.get("add_space_prefix", bool, True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        from_pieces.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(from_pieces)
    return backend, True


def _merges_of_scores(read: _Metadata, vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: pieces may merge where they make another one, those of the best score first."""
    mergeable = (_TokenType.NORMAL, _TokenType.USER_DEFINED)
    ranked = []
    for index, (token, kind) in enumerate(zip(read.tokens, read.types, strict=True)):
        if kind not in mergeable:
            continue
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right))
    ranked.sort()
    return [(read.tokens[left], read.tokens[right]) for _, _, left, right in ranked]


def _add_tokens(
    backend: tokenizers.Tokenizer, read: _Metadata, named_tokens: dict[str, str], unless_with: str | None
) -> frozenset[str]:
    """Marks the tokens that are found in text as a whole; returns the special ones."""
    special = set(named_tokens.values())
    user_defined = []
    for token, kind in zip(read.tokens, read.types, strict=True):
        if kind in (_TokenType.CONTROL, _TokenType.UNKNOWN):
            special.add(token)
        elif kind == _TokenType.USER_DEFINED and token not in special:
            user_defined.append(token)
    in_order = [token for token in read.tokens if token in special]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in in_order])
    found_whole = (token for token in user_defined if unless_with is None or unless_with not in token)
    backend.add_tokens([AddedToken(token, normalized=False) for token in found_whole])
    return frozenset(special)


def _set_post_processor(
    backend: tokenizers.Tokenizer, read: _Metadata, named_tokens: dict[str, str], add_bos: bool
) -> None:
    around: list[str | None] = []
    for key, name, default in (("add_bos_token", "bos_token", add_bos), ("add_eos_token", "eos_token", False)):
        wanted = read.get(key, bool, default and name in named_tokens)
        if wanted and name not in named_tokens:
            raise read.error(f"{_PREFIX}{key} is true, but {_PREFIX}{_NAMED_TOKENS[name]} is missing")
        around.append(named_tokens[name] if wanted else None)
    if any(around):
        surround(backend, *around)


_BUILDERS = {"gpt2": _build_byte_level, "llama": _build_sentence_piece}
