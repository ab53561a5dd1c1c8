"""Finds and reads a checkpoint's tokenizer: a Hugging Face folder (tokenizer.json, else a SentencePiece model), or a
GGUF file's metadata.

Whatever is wrong with a file ends in one CheckpointError that names it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from octavo.checkpoints import read_gguf_metadata
from octavo.errors import CheckpointError, OctavoError, UnsupportedError
from octavo.logging import init_logger, one_line
from octavo.tokenizers.gguf import build_from_gguf
from octavo.tokenizers.post_processor import surround
from octavo.tokenizers.sentence_piece import SPACE, TokenType
from octavo.tokenizers.sentence_piece_file import SentencePieceFile
from octavo.tokenizers.tokenizer import Tokenizer

__all__ = ["load_tokenizer"]

logger = init_logger(__name__)

# Its last character, of no script, is in hardly any vocabulary.
_RARE_TEXT = "a \U0010fffd"
_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """The part of tokenizer.json that is read here."""

    added_tokens: list[_AddedToken] = []


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads the tokenizer of the checkpoint at ``path`` (a Hugging Face folder or a .gguf file).

    Raises:
        CheckpointError: a file is missing or malformed.
        UnsupportedError: the tokenizer is of a kind that octavo does not have.
    """
    if path.is_dir():
        return _load_folder(path)
    if _is_gguf(path):
        metadata = read_gguf_metadata(path)
        with _one_error(path):
            tokenizer = build_from_gguf(metadata, str(path))
            _try_out(tokenizer)
        return tokenizer
    raise CheckpointError("no tokenizer here: expected a folder with tokenizer.json or a .gguf file", file=str(path))


def _is_gguf(path: Path) -> bool:
    """By its first bytes where its name does not say it: files in a cache may have no suffix."""
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


@contextmanager
def _one_error(file: Path) -> Iterator[None]:
    """Turns everything that goes wrong inside into an error that names the file, the library's Rust panics included."""
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{file}: {error}") from error
    except (OctavoError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        cause = one_line(str(error)) or type(error).__name__
        raise CheckpointError(f"malformed tokenizer: {cause[:300]}", file=str(file)) from error


def _load_folder(folder: Path) -> Tokenizer:
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"no tokenizer here: expected one of {', '.join(_FILES)}", file=str(folder))
    config_file = folder / "tokenizer_config.json"
    config = _read_object(config_file)
    model_tokens: dict[str, str] = {}
    with _one_error(file):
        if file.suffix == ".json":
            backend = tokenizers.Tokenizer.from_file(str(file))
            _compare_ids(backend, file)
        else:
            backend, model_tokens = _read_sentence_piece(file, config)
    with _one_error(config_file):
        # Older checkpoints keep the special tokens' names in a file of their own.
        named_tokens = model_tokens | _named_tokens(folder / "special_tokens_map.json") | _named_tokens(config_file)
        special_tokens = _add_tokens(backend, config, named_tokens, config_file)
        _set_post_processor(backend, config, named_tokens, config_file)
        chat_template = _chat_template(folder, config, config_file)
    with _one_error(file):
        tokenizer = Tokenizer(
            backend,
            named_tokens=named_tokens,
            special_tokens=special_tokens,
            chat_template=chat_template,
            file=str(file),
        )
        _try_out(tokenizer)
    return tokenizer


def _read_sentence_piece(file: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """(tokenizer, its special tokens by their role). Where ``config`` does not say what is put before a text, it is
    made to say what SentencePiece models mostly have there."""
    model = SentencePieceFile(file)
    backend = model.build(prefix_once=config.get("legacy") is False)
    types = list(zip(model.tokens, model.types, strict=True))
    special = [token for token, kind in types if kind in (TokenType.UNKNOWN, TokenType.CONTROL)]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    found_whole = [token for token, kind in types if kind == TokenType.USER_DEFINED and SPACE not in token]
    found_whole += _later_tokens(file.parent / "added_tokens.json", len(types))
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in found_whole])
    if config.get("add_bos_token") is None:
        config["add_bos_token"] = model.is_bpe and "bos_token" in model.named_tokens
    return backend, model.named_tokens


def _later_tokens(file: Path, num_pieces: int) -> list[str]:
    """Tokens that were added to a SentencePiece model, in the order of their ids."""
    found = _read_object(file)
    ids = list(found.values())
    if not all(type(token_id) is int for token_id in ids):
        raise CheckpointError("each token must have an integer id", file=str(file))
    later = sorted((token for token in found if found[token] >= num_pieces), key=found.__getitem__)
    if [found[token] for token in later] != list(range(num_pieces, num_pieces + len(later))):
        raise CheckpointError(f"ids must follow the model's {num_pieces} pieces without a gap", file=str(file))
    return later


def _try_out(tokenizer: Tokenizer) -> None:
    """Some of what is wrong with a file shows only in use: a missing unknown token, ids that are put around a text."""
    beyond = max(tokenizer.encode(_RARE_TEXT), default=0)
    if beyond >= tokenizer.vocab_size:
        message = f"text is encoded with token id {beyond}, but the vocabulary ends at {tokenizer.vocab_size - 1}"
        raise CheckpointError(message, file=tokenizer.file)


def _compare_ids(backend: tokenizers.Tokenizer, file: Path) -> None:
    """The library gives added tokens ids of its own where the file's do not follow the vocabulary's."""
    stated = msgspec.json.decode(file.read_bytes(), type=_AddedTokens).added_tokens
    moved = [token for token in stated if backend.token_to_id(token.content) != token.id]
    if moved:
        first = moved[0]
        message = "%s: %d added tokens have other ids than it says; the first is %r: id %s, not %d"
        logger.warning(message, file, len(moved), first.content, backend.token_to_id(first.content), first.id)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot be read as text: {one_line(str(error))}", file=str(file)) from error


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object; {} where there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:  # ValueError: also for numbers of too many digits
        raise CheckpointError(f"not valid JSON: {one_line(str(error))}", file=str(file)) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"expected a JSON object, found {type(found).__name__}", file=str(file))
    return found


def _token_text(value: Any, key: str, file: Path) -> str:
    """A token is given by its text, or by an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise CheckpointError(f"{key} must be a token's text, found {type(text).__name__}", file=str(file))
    return text


def _named_tokens(file: Path) -> dict[str, str]:
    found = _read_object(file)
    return {key: _token_text(found[key], key, file) for key in _NAMED_TOKENS if found.get(key) is not None}


def _add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], named_tokens: dict[str, str], file: Path
) -> frozenset[str]:
    """Adds what the configuration says beyond tokenizer.json; returns the texts of all special tokens."""
    added = backend.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    known = {token.content for token in added.values()}
    for token_id, entry in _stated_tokens(config, file):
        content = entry["content"]
        if content in known and (content in special or not entry.get("special")):
            continue
        flags = {flag: bool(entry.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip", "special")}
        normalized = bool(entry.get("normalized", not flags["special"]))
        _add(backend, tokenizers.AddedToken(content, normalized=normalized, **flags))
        if backend.token_to_id(content) != token_id:
            message = f"added_tokens_decoder gives token {content!r} the id {token_id}, but it is "
            raise CheckpointError(message + f"{backend.token_to_id(content)} by tokenizer.json", file=str(file))
        known.add(content)
        if flags["special"]:
            special.add(content)
    for name, content in named_tokens.items():
        if content in special or not content:
            continue
        if backend.token_to_id(content) is None:
            logger.warning("%s: %s %r is not in the vocabulary; it is left out", file, name, content)
            continue
        _add(backend, tokenizers.AddedToken(content, special=True, normalized=False))
        special.add(content)
    return frozenset(special)


def _stated_tokens(config: dict[str, Any], file: Path) -> list[tuple[int, dict[str, Any]]]:
    """The configuration's added_tokens_decoder, by id."""
    stated = config.get("added_tokens_decoder")
    if stated is None:
        return []
    well_formed = isinstance(stated, dict) and all(
        key.isascii() and key.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)
        for key, entry in stated.items()
    )
    if not well_formed:
        message = (
            "added_tokens_decoder must be an object of token ids, each with an object that has the token's content"
        )
        raise CheckpointError(message, file=str(file))
    return sorted(((int(key), entry) for key, entry in stated.items()), key=lambda item: item[0])


def _add(backend: tokenizers.Tokenizer, token: tokenizers.AddedToken) -> None:
    if token.special:
        backend.add_special_tokens([token])
    else:
        backend.add_tokens([token])


def _set_post_processor(
    backend: tokenizers.Tokenizer, config: dict[str, Any], named_tokens: dict[str, str], file: Path
) -> None:
    """Where the configuration says what is put around a text, that holds (as in transformers); else tokenizer.json."""
    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return
    around = []
    for flag, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        stated = config.get(flag)
        if stated is not None and not isinstance(stated, bool):
            raise CheckpointError(f"{flag} must be true or false, found {stated!r}", file=str(file))
        around.append(named_tokens.get(name) if stated else None)
        if stated and (around[-1] is None or backend.token_to_id(around[-1]) is None):
            raise CheckpointError(f"{flag} is true, but there is no {name} in the vocabulary", file=str(file))
    surround(backend, *around)


def _chat_template(folder: Path, config: dict[str, Any], config_file: Path) -> str | None:
    """A file of its own goes before the configuration's entry; of several named templates, the one named default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    stated = config.get("chat_template")
    if isinstance(stated, list) and all(isinstance(entry, dict) for entry in stated):
        stated = next((entry.get("template") for entry in stated if entry.get("name") == "default"), None)
    if stated is not None and not isinstance(stated, str):
        message = f"chat_template must be text or a list of named texts, found {type(stated).__name__}"
        raise CheckpointError(message, file=str(config_file))
    return stated
