"""Encodes text in which only chosen spans are special tokens, and the same names elsewhere are plain text.

A copy of the tokenizer knows the special tokens by secret names that no text can hold, under their own ids. The chosen
spans are given those names before encoding, all in one text, so that everything else is encoded as always.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Any

import tokenizers

from octavo.errors import CheckpointError
from octavo.tokenizers.encoding import encode

__all__ = ["ProtectedEncoder"]


class ProtectedEncoder:
    """The copy.

    Args:
        backend: the tokenizer to copy.
        special_tokens: their names.
        file: where it came from, for messages.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: frozenset[str], file: str) -> None:
        # Private-use characters: no normalizer changes them and no word is joined by them. 100 random bits.
        nonce = "".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(8))
        self._file = file
        self._secret_names = {name: f"{nonce}{chr(0xF0000 + i)}" for i, name in enumerate(sorted(special_tokens))}
        state = json.loads(backend.to_str())
        _rename(state, self._secret_names)
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(state))
        for name, secret_name in self._secret_names.items():
            if self._backend.token_to_id(secret_name) != backend.token_to_id(name):
                raise CheckpointError(f"special token {name!r} cannot be told from text in this vocabulary", file=file)

    def encode(self, text: str, written: Sequence[tuple[int, int]]) -> list[int]:
        """Token ids of ``text``; only the spans ``written`` are special tokens."""
        parts = []
        end = 0
        for start, stop in written:
            parts += [text[end:start], self._secret_names[text[start:stop]]]
            end = stop
        parts.append(text[end:])
        return encode(self._backend, "".join(parts), False, self._file)


def _rename(state: dict[str, Any], names: dict[str, str]) -> None:
    """Gives tokens new names everywhere in tokenizer.json's contents, and forgets how to merge them from parts."""
    for added in state["added_tokens"]:
        added["content"] = names.get(added["content"], added["content"])
    state["post_processor"] = None
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            [left, right]
            for left, right in model["merges"]
            if left + right.removeprefix(prefix) not in names and left not in names and right not in names
        ]
