"""Makes a tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2"), SentencePiece's BPE ("llama") or unigram
("t5").

Takes the metadata as a dict and knows nothing of the file.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from octavo.errors import CheckpointError, UnsupportedError
from octavo.logging import init_logger
from octavo.tokenizers.gguf_pre_tokenizers import pre_tokenizer_kind
from octavo.tokenizers.post_processor import surround
from octavo.tokenizers.sentence_piece import (
    MAX_TOKEN_LENGTH,
    SPACE,
    SentencePieces,
    TokenType,
    build_bpe,
    build_unigram,
    first_repeated,
)
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
_PHI3_AS_THEY_ARE = ("<unk>", "<s>", "<|endoftext|>")
_TOKEN_TYPES = tuple(map(int, TokenType))
_MAX_CHARSMAP_BYTES = 1 << 24  # thirty times the largest in use


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
        if len(longest) > MAX_TOKEN_LENGTH:
            message = f"{_PREFIX}tokens has one of {len(longest)} characters, at most {MAX_TOKEN_LENGTH} are expected"
            raise self.error(message)
        if len(set(tokens)) != len(tokens):
            raise self.error(f"{_PREFIX}tokens {first_repeated(tokens)}")
        return tokens

    def _types(self) -> list[int]:
        types = self.array("token_type", len(self.tokens))
        if types is None:
            return [TokenType.NORMAL] * len(self.tokens)
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
    backend, add_bos, add_eos = _BUILDERS[kind](read, named_tokens)
    # SentencePiece's space sign is not found in text as it is: merging makes the tokens that have it.
    special_tokens = _add_tokens(backend, read, named_tokens, unless_with=None if kind == "gpt2" else SPACE)
    if kind == "llama" and metadata.get("general.architecture") == "phi3":
        _take_white_space(backend)
    _set_post_processor(backend, read, named_tokens, add_bos, add_eos)
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


# (tokenizer, whether a BOS token goes before a text and an EOS token after it if the file does not say).
_Built = tuple[tokenizers.Tokenizer, bool, bool]


def _build_byte_level(read: _Metadata, named_tokens: dict[str, str]) -> _Built:
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
    return backend, kind.add_bos, False


def _build_sentence_piece_bpe(read: _Metadata, named_tokens: dict[str, str]) -> _Built:
    return build_bpe(_sentence_pieces(read, named_tokens, space_prefix=True)), True, False


def _build_unigram(read: _Metadata, named_tokens: dict[str, str]) -> _Built:
    return build_unigram(_sentence_pieces(read, named_tokens, space_prefix=False)), False, True


def _sentence_pieces(read: _Metadata, named_tokens: dict[str, str], space_prefix: bool) -> SentencePieces:
    scores = read.array("scores", len(read.tokens))
    if scores is None:
        raise read.error(f"{_PREFIX}scores is missing")
    unknown = next((t for t, kind in zip(read.tokens, read.types, strict=True) if kind == TokenType.UNKNOWN), None)
    return SentencePieces(
        tokens=read.tokens,
        scores=scores,
        types=read.types,
        unknown=named_tokens.get("unk_token", unknown),
        file=read.file,
        space_prefix=read.get("add_space_prefix", bool, space_prefix),
        single_spaces=read.get("remove_extra_whitespaces", bool, False),
        charsmap=_charsmap(read),
    )


def _charsmap(read: _Metadata) -> bytes:
    found = read.array("precompiled_charsmap") or []
    if len(found) > _MAX_CHARSMAP_BYTES or not all(isinstance(byte, int) and -128 <= byte < 256 for byte in found):
        raise read.error(f"{_PREFIX}precompiled_charsmap must hold up to {_MAX_CHARSMAP_BYTES} bytes")
    return bytes(byte & 255 for byte in found)


def _add_tokens(
    backend: tokenizers.Tokenizer, read: _Metadata, named_tokens: dict[str, str], unless_with: str | None
) -> frozenset[str]:
    """Marks the tokens that are found in text as a whole; returns the special ones."""
    special = set(named_tokens.values())
    user_defined = []
    for token, kind in zip(read.tokens, read.types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.add(token)
        elif kind == TokenType.USER_DEFINED and token not in special:
            user_defined.append(token)
    in_order = [token for token in read.tokens if token in special]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in in_order])
    found_whole = (token for token in user_defined if unless_with is None or unless_with not in token)
    backend.add_tokens([AddedToken(token, normalized=False) for token in found_whole])
    return frozenset(special)


def _take_white_space(backend: tokenizers.Tokenizer) -> None:
    """Phi-3's own tokens, in all forms but GGUF, say that they take in the white space after them."""
    for token in backend.get_added_tokens_decoder().values():
        if token.content not in _PHI3_AS_THEY_ARE:
            own = AddedToken(token.content, special=token.special, normalized=False, rstrip=True)
            (backend.add_special_tokens if token.special else backend.add_tokens)([own])


def _set_post_processor(
    backend: tokenizers.Tokenizer, read: _Metadata, named_tokens: dict[str, str], add_bos: bool, add_eos: bool
) -> None:
    around: list[str | None] = []
    for key, name, default in (("add_bos_token", "bos_token", add_bos), ("add_eos_token", "eos_token", add_eos)):
        wanted = read.get(key, bool, default and name in named_tokens)
        if wanted and name not in named_tokens:
            raise read.error(f"{_PREFIX}{key} is true, but {_PREFIX}{_NAMED_TOKENS[name]} is missing")
        around.append(named_tokens[name] if wanted else None)
    if any(around):
        surround(backend, *around)


_BUILDERS = {"gpt2": _build_byte_level, "llama": _build_sentence_piece_bpe, "t5": _build_unigram}
