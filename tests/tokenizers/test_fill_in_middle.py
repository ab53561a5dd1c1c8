"""Specification: the tokens that ask for the text between two others, and the prompt that is made with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from octavo.errors import UnsupportedError
from octavo.tokenizers import FillInMiddle, Tokenizer, load_tokenizer

Write = Callable[..., Path]
Load = Callable[[dict[str, Any]], Tokenizer]


@pytest.fixture
def backend(byte_level_json: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(byte_level_json)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "PSM"),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "PSM"),
        (["<fim-prefix>", "<fim-suffix>", "<fim-middle>"], "PSM"),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "PSM"),
        (["▁<PRE>", "▁<SUF>", "▁<MID>"], "PSM"),
        (["<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"], "SPM"),
        (["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], "SP"),
    ],
)
def test_well_known_tokens_are_found_in_a_vocabulary_and_put_in_their_models_order(
    write_folder: Write, backend: tokenizers.Tokenizer, names: list[str], order: str
) -> None:
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer = load_tokenizer(write_folder(backend))
    ids = dict(zip("PSM", map(backend.token_to_id, names), strict=True))
    before, after = (tokenizer.encode(text) for text in ("def f(", "return"))
    parts = {"P": [ids["P"], *before], "S": [ids["S"], *after], "M": [ids["M"]]}
    assert tokenizer.encode_fill_in_middle("def f(", "return") == [i for part in order for i in parts[part]]


def test_a_vocabulary_without_them_says_so(write_folder: Write, backend: tokenizers.Tokenizer) -> None:
    backend.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>"])  # the third one is missing
    tokenizer = load_tokenizer(write_folder(backend))
    assert tokenizer.fill_in_middle is None
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json: the vocabulary has no tokens for filling in"):
        tokenizer.encode_fill_in_middle("a", "b")


@pytest.mark.parametrize(
    "keys",
    [
        ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
        ("prefix_token_id", "suffix_token_id", "middle_token_id"),
    ],
)
def test_a_gguf_file_says_which_they_are(
    load_gguf: Load, gpt2_metadata: dict[str, Any], keys: tuple[str, str, str]
) -> None:
    stated = {f"tokenizer.ggml.{key}": token_id for key, token_id in zip(keys, (40, 41, 42), strict=True)}
    assert load_gguf(gpt2_metadata).fill_in_middle is None
    assert load_gguf(gpt2_metadata | stated).fill_in_middle == FillInMiddle(40, 41, 42)


@pytest.mark.parametrize(
    ("flags", "begun"),
    [
        ({"add_bos_token": True, "add_eos_token": True}, ["<|begin|>"]),
        ({"add_bos_token": False, "add_eos_token": True}, []),
        ({"add_bos_token": True, "add_eos_token": True, "eos_token": "<|begin|>"}, ["<|begin|>"]),
    ],
)
def test_the_prompt_begins_as_any_text_does_and_does_not_end(
    write_folder: Write, backend: tokenizers.Tokenizer, flags: dict[str, Any], begun: list[str]
) -> None:
    backend.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    tokenizer = load_tokenizer(write_folder(backend, {"bos_token": "<|begin|>", "eos_token": "<|end|>"} | flags))
    ids = tokenizer.encode_fill_in_middle("", "")
    assert [tokenizer.token_string(token_id) for token_id in ids] == [
        *begun,
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
    ]


def test_a_token_is_spelt_as_in_the_vocabulary(write_folder: Write, backend: tokenizers.Tokenizer) -> None:
    tokenizer = load_tokenizer(write_folder(backend))
    ids = tokenizer.encode(" é\n<|end|>")
    assert [tokenizer.token_string(token_id) for token_id in ids] == backend.encode(" é\n<|end|>").tokens
    assert tokenizer.token_string(tokenizer.vocab_size) == ""
