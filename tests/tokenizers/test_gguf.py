"""Specification of tokenizers from GGUF metadata: SentencePiece's and transformers' results, and what is refused."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from octavo.checkpoints import resolve_model
from octavo.errors import CheckpointError, UnsupportedError
from octavo.tokenizers import Tokenizer, load_tokenizer

Load = Callable[[dict[str, Any]], Tokenizer]

_SCRIPTS = st.one_of(
    st.characters(codec="ascii"),
    st.sampled_from("éñüßœŁşžïÀ¿¡«»–—…“”€£§©™½²³"),
    st.sampled_from("абвЖЩαβγΩאבגשلسميन्दिไทยกิ"),
    st.sampled_from("漢字仮名交じり文かなカナ한국어조합你好世界，。"),
    st.sampled_from("🙂👩‍👧👍🏽🇩🇪🏳️\u0301\u0308\u200d\u202e\u2028\u00a0\u3000"),
    st.sampled_from("0123456789٣٤५६Ⅷ①"),
    st.sampled_from([" ", "  ", "\n", "\n\n", "\r\n", "\t", "'s", "'LL", " the", "ing", "▁", "<s>", "<|im_end|>"]),
)
TEXTS = st.one_of(st.text(max_size=20), st.lists(_SCRIPTS, max_size=30).map("".join))


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def demo_by_transformers(demo: Path) -> Any:
    """transformers' conversion of the same file. It knows nothing of pre-tokenizer kinds, so "smollm" is added: each
    digit is a word, as in the model's published tokenizer.json."""
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(demo.parent, gguf_file=demo.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    converted.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return converted


@pytest.fixture(scope="module")
def demo_tokenizer(demo: Path) -> Tokenizer:
    return load_tokenizer(demo)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_the_demo_model_is_encoded_as_by_transformers(
    demo_tokenizer: Tokenizer, demo_by_transformers: Any, text: str
) -> None:
    ids = demo_tokenizer.encode(text)
    assert ids == demo_by_transformers.encode(text)
    for skip in (True, False):
        assert demo_tokenizer.decode(ids, skip) == demo_by_transformers.backend_tokenizer.decode(ids, skip)


def test_the_demo_model_has_the_tokens_of_transformers(demo_tokenizer: Tokenizer, demo_by_transformers: Any) -> None:
    assert demo_tokenizer.vocab_size == len(demo_by_transformers)
    assert demo_tokenizer.bos_token == demo_by_transformers.bos_token == "<|im_start|>"
    assert demo_tokenizer.eos_token == demo_by_transformers.eos_token == "<|im_end|>"
    assert demo_tokenizer.eos_token_id == demo_by_transformers.eos_token_id
    assert demo_tokenizer.chat_template == demo_by_transformers.chat_template
    every_id = list(range(demo_tokenizer.vocab_size))
    library = demo_by_transformers.backend_tokenizer
    for skip in (True, False):
        assert demo_tokenizer.decode(every_id, skip) == library.decode(every_id, skip)


def test_control_another_way_to_cut_text_gives_other_ids(demo_tokenizer: Tokenizer) -> None:
    # Digits are words of their own: so the space before is not merged with the first one's bytes.
    digits = demo_tokenizer.encode("1234 ٤")
    assert len(digits) == len([*"1234", " "]) + len(demo_tokenizer.encode("٤"))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS.filter(lambda text: "<s>" not in text and "\x00" not in text))
def test_llama_kind_is_encoded_as_by_sentencepiece(
    llama: Tokenizer, sentence_piece: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    """Names of control tokens aside: SentencePiece never finds them in text."""
    ids = llama.encode(text)
    assert ids == [sentence_piece.bos_id(), *sentence_piece.encode(text)]
    assert llama.encode(text, add_special_tokens=False) == ids[1:]
    assert llama.decode(ids) == text.replace("▁", " ")


@pytest.fixture(scope="module")
def llama(llama_metadata: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, write_gguf: Any) -> Tokenizer:
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("llama") / "model.gguf", llama_metadata))


def test_llama_kind_falls_back_to_bytes(llama: Tokenizer, llama_metadata: dict[str, Any]) -> None:
    tokens = llama_metadata["tokenizer.ggml.tokens"]
    ids = llama.encode("🫠", add_special_tokens=False)
    assert [tokens[index] for index in ids] == ["▁", "<0xF0>", "<0x9F>", "<0xAB>", "<0xA0>"]


def test_llama_kind_knows_its_special_tokens(llama: Tokenizer) -> None:
    assert llama.special_tokens == {"<unk>", "<s>", "</s>"}
    assert (llama.bos_token, llama.eos_token, llama.eos_token_id) == ("<s>", "</s>", 2)
    assert llama.encode("a</s>", add_special_tokens=False)[-1] == 2


def test_llama_kind_without_a_space_in_front(load_gguf: Load, llama_metadata: dict[str, Any]) -> None:
    plain = load_gguf(llama_metadata | {"tokenizer.ggml.add_space_prefix": False})
    with_space = load_gguf(llama_metadata)
    assert plain.encode(" the dog") == with_space.encode("the dog")
    assert plain.decode(plain.encode(" the dog")) == " the dog"
    assert with_space.decode(with_space.encode("the dog")) == "the dog"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_what_is_put_around_a_text(
    load_gguf: Load, request: pytest.FixtureRequest, kind: str, bos: bool, eos: bool
) -> None:
    metadata = request.getfixturevalue(f"{kind}_metadata")
    flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    tokenizer = load_gguf(metadata | flags)
    inner = tokenizer.encode("the dog", add_special_tokens=False)
    before = [metadata["tokenizer.ggml.bos_token_id"]] if bos else []
    after = [metadata["tokenizer.ggml.eos_token_id"]] if eos else []
    assert tokenizer.encode("the dog") == [*before, *inner, *after]


def test_user_defined_tokens_are_found_whole_and_are_not_special(
    load_gguf: Load, gpt2_metadata: dict[str, Any]
) -> None:
    tool = "<tool▁call>"  # the sign means nothing to byte-level vocabularies
    metadata = gpt2_metadata | {
        "tokenizer.ggml.tokens": [*gpt2_metadata["tokenizer.ggml.tokens"], tool],
        "tokenizer.ggml.token_type": [*gpt2_metadata["tokenizer.ggml.token_type"], 4],
    }
    tokenizer = load_gguf(metadata)
    tool_id = tokenizer.vocab_size - 1
    assert tokenizer.encode(f"a{tool}a")[1:-1] == [tool_id]
    assert tokenizer.decode([tool_id], skip_special_tokens=True) == tool
    assert tool_id not in tokenizer.special_token_ids
    assert tokenizer.special_tokens == {"<|begin|>", "<|end|>", "<|中|>"}
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


def test_phi3s_tokens_take_in_the_white_space_after_them(load_gguf: Load, llama_metadata: dict[str, Any]) -> None:
    """As its tokenizer.json says; GGUF cannot."""
    size = len(llama_metadata["tokenizer.ggml.tokens"])
    added = {"tokens": ["<|user|>", "<|endoftext|>", "<|end|>"], "token_type": [3, 3, 4], "scores": [-1e3] * 3}
    metadata = {
        key: value + added.get(key.rpartition(".")[2], []) if isinstance(value, list) else value
        for key, value in llama_metadata.items()
    }
    text = "<|user|>\n the dog<|end|>\n<|endoftext|>\n"
    plain = load_gguf(metadata).encode(text, add_special_tokens=False)
    taken = load_gguf(metadata | {"general.architecture": "phi3"}).encode(text, add_special_tokens=False)
    newline = plain[-1]
    assert [size, size + 2, size + 1, newline] == [index for index in taken if index >= size or index == newline]
    assert plain.count(newline) == 3
    dog = load_gguf(metadata).encode("the dog", add_special_tokens=False)
    assert taken[1 : 1 + len(dog)] == dog


def words_metadata(text: str, kind: str | None) -> dict[str, Any]:
    """A vocabulary in which every part of ``text`` is a token, so that its words, however cut, are tokens."""
    ((spelt, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    parts = {spelt[i:j] for i in range(len(spelt)) for j in range(i + 1, len(spelt) + 1)}
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    merges = sorted({(part[:cut], part[cut:]) for part in parts for cut in range(1, len(part))})
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": sorted(parts | letters),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
    }
    return metadata if kind is None else metadata | {"tokenizer.ggml.pre": kind}


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("gpt-2", "It's  1234\n\nx ...", ["It", "'s", " ", " 1234", "\n", "\n", "x", " ..."]),
        ("smollm", "It's  1234\n\nx", ["It", "'s", "  ", "1", "2", "3", "4", "\n", "\n", "x"]),
        ("llama-bpe", "IT'S  1234\n\nx.\n", ["IT", "'S", " ", " ", "123", "4", "\n\n", "x", ".\n"]),
        ("llama3", "1234", ["123", "4"]),
        ("qwen2", "IT'S  1234\n\nx.\n", ["IT", "'S", " ", " ", "1", "2", "3", "4", "\n\n", "x", ".\n"]),
        ("deepseek-r1-qwen", "(a 12", ["(a", " ", "1", "2"]),
        ("tekken", "HelloWorld's 12/\n", ["Hello", "World", "'s", " ", "1", "2", "/\n"]),
        ("default", "Hi--you 12345", ["Hi", "--", "you", " ", "123", "45"]),
        (None, "Hi--you", ["Hi", "--", "you"]),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_kind_says(
    load_gguf: Load, kind: str | None, text: str, words: list[str]
) -> None:
    tokenizer = load_gguf(words_metadata(text, kind))
    assert [tokenizer.decode([index]) for index in tokenizer.encode(text)] == words


def test_qwen_text_is_composed_first(load_gguf: Load) -> None:
    composed, parts = "é", "e\u0301"
    tokenizer = load_gguf(words_metadata(composed, "qwen2"))
    assert tokenizer.encode(parts) == tokenizer.encode(composed)
    other = load_gguf(words_metadata(composed, "deepseek-r1-qwen"))
    assert other.encode(parts) != other.encode(composed)


def test_a_word_that_is_a_token_needs_no_merges_for_llama3(load_gguf: Load) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*letters, "hello"]}
    metadata |= {"tokenizer.ggml.merges": ["h e"], "tokenizer.ggml.tokens": [*letters, "hello", "he"]}
    assert load_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("hello") != [256]
    assert load_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("hello") == [256]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'.*gpt2, llama"),
        ({"tokenizer.ggml.pre": "jais-2"}, "'jais-2'.*llama-bpe"),
    ],
)
def test_kinds_that_octavo_does_not_have_are_refused_by_name(
    load_gguf: Load, gpt2_metadata: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError, match=r"model\.gguf: .*" + named):
        load_gguf(gpt2_metadata | change)


def _without(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda metadata: {name: value for name, value in metadata.items() if name != key}


def _with(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda metadata: metadata | {key: change(metadata.get(key))}


_G = "tokenizer.ggml."


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("gpt2", _without(_G + "model"), "model is missing"),
        ("gpt2", _without(_G + "tokens"), "tokens is missing"),
        ("gpt2", _without(_G + "merges"), "merges is missing"),
        ("llama", _without(_G + "scores"), "scores is missing"),
        ("gpt2", _with(_G + "model", lambda old: 3), "model must be of type str, found int"),
        ("gpt2", _with(_G + "pre", lambda old: True), "pre must be of type str, found bool"),
        ("gpt2", _with(_G + "tokens", lambda old: "abc"), "tokens must be an array, found str"),
        ("gpt2", _with(_G + "tokens", lambda old: [1, 2]), "tokens must hold text only"),
        ("gpt2", _with(_G + "tokens", lambda old: [*old[:-1], old[0]]), "twice: ids 0 and"),
        ("gpt2", _with(_G + "tokens", lambda old: [*old[:-1], "x" * 5000]), "one of 5000 characters"),
        ("gpt2", _with(_G + "tokens", lambda old: old[:-1]), r"token_type has \d+ entries for \d+ tokens"),
        ("gpt2", _with(_G + "token_type", lambda old: [9, *old[1:]]), "token_type must be 1 to 6, found 9"),
        ("gpt2", _with(_G + "merges", lambda old: [*old, "abc"]), "merges has 'abc'"),
        ("gpt2", _with(_G + "merges", lambda old: [*old, "qqq zzz"]), "merges has 'qqq zzz'"),
        ("gpt2", _with(_G + "merges", lambda old: [*old, "a b c"]), "merges has 'a b c'"),
        ("gpt2", _with(_G + "merges", lambda old: [1, 2]), "merges must hold text only"),
        ("gpt2", _with(_G + "eos_token_id", lambda old: 10**6), "eos_token_id is 1000000, but there are"),
        ("gpt2", _with(_G + "bos_token_id", lambda old: "1"), "bos_token_id must be of type int, found str"),
        ("gpt2", _with(_G + "add_bos_token", lambda old: 1), "add_bos_token must be of type bool, found int"),
        ("gpt2", _with("tokenizer.chat_template", lambda old: 7), "chat_template must be text, found int"),
        ("llama", _with(_G + "scores", lambda old: old[:-1]), r"scores has \d+ entries for \d+ tokens"),
        ("llama", _with(_G + "scores", lambda old: [math.nan, *old[1:]]), "scores must hold numbers only"),
        ("llama", _with(_G + "scores", lambda old: [str(x) for x in old]), "scores must hold numbers only"),
        ("llama", _with(_G + "add_space_prefix", lambda old: "yes"), "add_space_prefix must be of type bool"),
    ],
)
def test_malformed_metadata_are_refused_in_one_line(
    load_gguf: Load,
    request: pytest.FixtureRequest,
    kind: str,
    damage: Callable[[dict[str, Any]], dict[str, Any]],
    message: str,
) -> None:
    metadata = request.getfixturevalue(f"{kind}_metadata")
    with pytest.raises(CheckpointError, match=r"model\.gguf: .*" + message) as caught:
        load_gguf(damage(metadata))
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 600


def test_a_bos_token_that_is_wanted_must_exist(load_gguf: Load, gpt2_metadata: dict[str, Any]) -> None:
    metadata = _without("tokenizer.ggml.bos_token_id")(gpt2_metadata) | {"tokenizer.ggml.add_bos_token": True}
    with pytest.raises(CheckpointError, match=r"add_bos_token is true, but tokenizer\.ggml\.bos_token_id is missing"):
        load_gguf(metadata)


def test_some_text_without_tokens_is_a_malformed_vocabulary(load_gguf: Load, llama_metadata: dict[str, Any]) -> None:
    kept = [i for i, token in enumerate(llama_metadata["tokenizer.ggml.tokens"]) if token not in ("<0x41>", "<unk>")]
    metadata = {k: [v[i] for i in kept] if isinstance(v, list) else v for k, v in llama_metadata.items()}
    metadata = _without("tokenizer.ggml.unknown_token_id")(metadata)
    with pytest.raises(CheckpointError, match="no byte token <0x41> and no unknown token"):
        load_gguf(metadata)


def test_nameless_tokens_have_ids_all_the_same(load_gguf: Load) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a b"]}
    tokenizer = load_gguf(metadata | {"tokenizer.ggml.tokens": [*letters, "", "", "ab"]})
    assert tokenizer.encode("ab") == [258]


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing\.gguf"):
        load_tokenizer(tmp_path / "missing.gguf")
    (tmp_path / "model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=r"model\.bin: no tokenizer here"):
        load_tokenizer(tmp_path / "model.bin")


def test_a_file_in_a_cache_may_have_no_suffix(demo: Path, tmp_path: Path) -> None:
    blob = tmp_path / "b179c9523d0e"
    blob.symlink_to(demo)
    assert load_tokenizer(blob).encode("a b c") == load_tokenizer(demo).encode("a b c")


def test_loading_the_demo_models_tokenizer_is_quick(demo: Path) -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        load_tokenizer(demo)
        times.append(time.perf_counter() - start)
    # 0.2 s on the machine it was written on; a slow one has room.
    assert min(times) < 1.5
