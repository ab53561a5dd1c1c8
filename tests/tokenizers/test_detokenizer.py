"""Specification of IncrementalDetokenizer: the pieces add up to the library's decoding of all ids, whatever the ids."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from octavo.errors import UnsupportedError
from octavo.tokenizers import IncrementalDetokenizer, Tokenizer, load_tokenizer

REPLACEMENT = "\ufffd"
# Of added tokens made of the byte alphabet only: the library decodes these letters as single bytes.
BYTE_LETTERS = "éÃĠ"


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def one_by_one(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> list[str]:
    """The control: each token decoded by itself."""
    return [tokenizer.decode([token_id], skip_special_tokens) for token_id in ids]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_pieces_add_up_to_the_text_of_all_ids(pair: Any, data: st.DataObject, skip_special_tokens: bool) -> None:
    # Some ids have no token.
    ids = data.draw(st.lists(st.integers(0, pair.tokenizer.vocab_size + 2), max_size=40))
    expected = pair.library.decode(ids, skip_special_tokens=skip_special_tokens)
    assert "".join(streamed(pair.tokenizer, ids, skip_special_tokens)) == expected
    assert pair.tokenizer.decode(ids, skip_special_tokens) == expected


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_broken_bytes_become_the_same_replacement_characters(
    make_pair: Callable[[str], Any], data: st.DataObject
) -> None:
    """Bytes at the borders of UTF-8's rules, as single tokens."""
    borders = [0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF]
    borders += [0xF0, 0xF1, 0xF4, 0xF5, 0xFF]
    single = st.sampled_from(borders).map(lambda byte: bytes([byte]))
    raw = b"".join(data.draw(st.lists(st.one_of(single, st.sampled_from(["▁".encode(), b"aa"])), max_size=24)))
    by_name = "byte-fallback", "byte-fallback, then metaspace", "byte-fallback, then strip and replace"
    for name in ("byte-level", *by_name):
        pair = make_pair(name)
        token_of = (lambda byte: f"<0x{byte:02X}>") if name in by_name else _letter
        ids = [pair.library.token_to_id(token_of(byte)) for byte in raw]
        assert "".join(streamed(pair.tokenizer, ids, True)) == pair.library.decode(ids)


def _letter(byte: int) -> str:
    """GPT-2's letter for a byte, found out from the library."""
    cut = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if byte < 0x80:
        return str(cut.pre_tokenize_str(chr(byte))[0][0])
    if byte in (0xC0, 0xC1) or byte > 0xF4:
        return chr(byte)  # in no text; printable Latin-1 stands for itself
    if byte >= 0xC2:
        first = {0xE0: b"\xe0\xa0\x80", 0xF0: b"\xf0\x90\x80\x80"}.get(byte)
        if first is None:
            first = bytes([byte]) + b"\x80" * (1 if byte < 0xE0 else 2 if byte < 0xF0 else 3)
        return str(cut.pre_tokenize_str(first.decode())[0][0][0])
    return str(cut.pre_tokenize_str(bytes([0xC2, byte]).decode())[0][0][1])


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT + BYTE_LETTERS), max_size=30)
)
def test_a_character_is_shown_as_soon_as_it_is_complete(make_pair: Callable[[str], Any], text: str) -> None:
    pair = make_pair("byte-level")
    ids = pair.tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(pair.tokenizer, skip_special_tokens=False)
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.push(token_id)
        assert shown == pair.library.decode(ids[:count], skip_special_tokens=False).rstrip(REPLACEMENT)
    assert detokenizer.finish() == ""
    assert shown == text


def test_a_run_of_byte_tokens_is_held_until_it_ends(make_pair: Callable[[str], Any]) -> None:
    pair = make_pair("byte-fallback")
    ids = [pair.library.token_to_id(token) for token in ("a", "<0xC3>", "<0xA9>", "<0x41>", "▁a")]
    assert streamed(pair.tokenizer, ids, True) == ["a", "", "", "", "éA a", ""]
    # The same run is worth a replacement character a byte if it ends badly, and nothing can mend it after 0xFF.
    ids = [pair.library.token_to_id(token) for token in ("<0x41>", "<0xC3>", "<0xFF>", "<0x41>", "a")]
    assert streamed(pair.tokenizer, ids, True) == ["", "", REPLACEMENT * 3, REPLACEMENT, "a", ""]
    assert pair.library.decode(ids) == REPLACEMENT * 4 + "a"


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "metaspace", "word pieces", "none"])
def test_control_decoding_one_by_one_is_not_the_same(make_pair: Callable[[str], Any], name: str) -> None:
    pair = make_pair(name)
    generator = random.Random(0)
    differ = 0
    for _ in range(100):
        ids = [generator.randrange(pair.tokenizer.vocab_size) for _ in range(30)]
        expected = pair.library.decode(ids)
        assert "".join(streamed(pair.tokenizer, ids, True)) == expected
        differ += "".join(one_by_one(pair.tokenizer, ids, True)) != expected
    assert differ > 50


def test_emoji_of_many_characters_come_out_whole_beside_special_tokens(make_pair: Callable[[str], Any]) -> None:
    pair = make_pair("byte-level")
    text = "<|begin|>👩‍👩‍👧‍👦<|中|>e\u0301 שלום<tool_call>🇩🇪<|end|>"
    ids = pair.tokenizer.encode(text)
    assert "".join(streamed(pair.tokenizer, ids, False)) == text
    assert "".join(streamed(pair.tokenizer, ids, True)) == "👩‍👩‍👧‍👦e\u0301 שלום<tool_call>🇩🇪"
    # A special token in the middle of a character: left out, it does not part the bytes.
    emoji = pair.tokenizer.encode("🫠")
    assert len(emoji) > 1
    ids = [emoji[0], pair.library.token_to_id("<|end|>"), *emoji[1:]]
    assert "".join(streamed(pair.tokenizer, ids, True)) == "🫠"
    assert REPLACEMENT in "".join(streamed(pair.tokenizer, ids, False))


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_tokenizers_that_set_nothing_apart_give_the_same_text_without_spaces_between_special_tokens(
    make_pair: Callable[[str], Any], data: st.DataObject
) -> None:
    for name in ("byte-level", "byte-fallback", "byte-fallback, one space stripped", "unigram"):
        tokenizer = make_pair(name).tokenizer
        special = st.sampled_from(sorted(tokenizer.special_token_ids))
        ids = data.draw(st.lists(st.one_of(special, st.integers(0, tokenizer.vocab_size)), max_size=20))
        joined = IncrementalDetokenizer(tokenizer, False, spaces_between_special_tokens=False)
        assert "".join([*map(joined.push, ids), joined.finish()]) == tokenizer.decode(ids, skip_special_tokens=False)


def test_control_one_that_sets_tokens_apart_joins_special_ones(make_pair: Callable[[str], Any]) -> None:
    tokenizer = make_pair("none").tokenizer
    ids = [make_pair("none").library.token_to_id(token) for token in ("a", "<|begin|>", "<|end|>", "<|end|>", "a")]
    joined = IncrementalDetokenizer(tokenizer, False, spaces_between_special_tokens=False)
    assert "".join([*map(joined.push, ids), joined.finish()]) == "a <|begin|><|end|><|end|> a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a <|begin|> <|end|> <|end|> a"


@pytest.mark.parametrize("token", ["<0x80>", "<0x41>", "a"])
def test_a_token_costs_the_same_however_long_the_text_is(make_pair: Callable[[str], Any], token: str) -> None:
    """With a cost that grows with the text this would take minutes."""
    pair = make_pair("byte-fallback, one space stripped")
    ids = [pair.library.token_to_id(token)] * 200_000
    start = time.perf_counter()
    pieces = streamed(pair.tokenizer, ids, True)
    assert time.perf_counter() - start < 10
    assert "".join(pieces) == pair.library.decode(ids)


@pytest.mark.parametrize(
    ("decoder_made", "name"),
    [
        (decoders.CTC(), "CTC"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]), "Replace"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip"),
        (decoders.Strip(" ", 0, 1), "Strip"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()]), "Metaspace"),
    ],
)
def test_a_decoder_that_needs_later_tokens_is_refused_by_name(
    write_folder: Callable[..., Path], decoder_made: decoders.Decoder, name: str
) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoder_made
    folder = write_folder(backend)
    with pytest.raises(UnsupportedError, match=name) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith(str(folder / "tokenizer.json"))


def test_the_text_of_one_token_is_that_inside_a_text(make_pair: Callable[[str], Any]) -> None:
    pair = make_pair("byte-fallback, one space stripped")
    decode = pair.tokenizer.decode_token
    assert decode(pair.library.token_to_id("▁a")) == " a"
    assert decode(pair.library.token_to_id("<|end|>")) == "<|end|>"
    assert decode(pair.library.token_to_id("<0x41>")) == "A"
    assert decode(pair.library.token_to_id("<0xC3>")) == REPLACEMENT
    assert decode(pair.tokenizer.vocab_size + 1) == ""


@pytest.mark.parametrize(
    ("name", "apart", "joined"),
    [("none", "a <|end|> <|end|> a", "a <|end|><|end|> a"), ("byte-level", *["a<|end|><|end|>a"] * 2)],
)
def test_special_tokens_side_by_side_can_be_joined(
    make_pair: Callable[[str], Any], name: str, apart: str, joined: str
) -> None:
    pair = make_pair(name)
    ids = [pair.library.token_to_id(token) for token in ("a", "<|end|>", "<|end|>", "a")]
    for spaces, expected in ((True, apart), (False, joined)):
        detokenizer = IncrementalDetokenizer(pair.tokenizer, False, spaces)
        assert "".join(detokenizer.push(token_id) for token_id in ids) == expected
    # Special tokens that are left out do not stand side by side.
    detokenizer = IncrementalDetokenizer(pair.tokenizer, True, False)
    assert "".join(detokenizer.push(token_id) for token_id in ids) == pair.library.decode(ids)
