"""Specification of SentencePiece vocabularies, from GGUF metadata and from model files: SentencePiece's own results.

The models are made here, as the families' were: Llama 2 and Phi-3, Gemma, T5's unigram, unigram with byte tokens.
"""

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from transformers.tokenization_utils_base import generate_merges

from octavo.errors import CheckpointError, UnsupportedError
from octavo.tokenizers import IncrementalDetokenizer, Tokenizer, load_tokenizer

_AS_IT_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
_RUNS = ["▁" * count for count in range(2, 32)] + ["\n" * count for count in range(1, 8)]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "split_digits": True, **_AS_IT_IS},
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "split_digits": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", *_RUNS],
        **_AS_IT_IS,
    },
    "t5": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True, **_AS_IT_IS},
}
# What SentencePiece does not find in text, and we do, or cannot be told from a space afterwards.
_NAMES = ("<s>", "</s>", "<unk>", "<pad>", "▁")
Write = Callable[[Path, dict[str, Any]], Path]


def _train(texts: list[str], **options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text.replace("\x00", "") for text in texts]),
        model_writer=model,
        vocab_size=1200,
        character_coverage=0.98,
        hard_vocab_limit=False,
        max_sentence_length=100_000,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return model.getvalue()


def _metadata(proto: bytes) -> dict[str, Any]:
    """As llama.cpp's converter writes it."""
    model = sentencepiece_model_pb2.ModelProto.FromString(proto)
    bpe = model.trainer_spec.model_type == 2
    metadata = {
        "tokenizer.ggml.model": "llama" if bpe else "t5",
        "tokenizer.ggml.tokens": [piece.piece for piece in model.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in model.pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in model.pieces],
        "tokenizer.ggml.bos_token_id": model.trainer_spec.bos_id,
        "tokenizer.ggml.eos_token_id": model.trainer_spec.eos_id,
        "tokenizer.ggml.unknown_token_id": model.trainer_spec.unk_id,
        "tokenizer.ggml.add_space_prefix": model.normalizer_spec.add_dummy_prefix,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.remove_extra_whitespaces": model.normalizer_spec.remove_extra_whitespaces,
    }
    if model.normalizer_spec.precompiled_charsmap:
        metadata["tokenizer.ggml.precompiled_charsmap"] = list(model.normalizer_spec.precompiled_charsmap)
    return metadata


class Made:
    """One model: SentencePiece's own, and ours from both forms."""

    def __init__(self, proto: bytes, folder: Path, write_gguf: Write) -> None:
        self.proto = proto
        self.original = sentencepiece.SentencePieceProcessor(model_proto=proto)
        self.folder = folder
        (folder / "tokenizer.model").write_bytes(proto)
        (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
        self.from_file = load_tokenizer(folder)
        self.from_gguf = load_tokenizer(write_gguf(folder / "model.gguf", _metadata(proto)))


Family = Callable[[str], Made]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory, write_gguf: Write, texts: list[str]) -> Family:
    made: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in made:
            folder = tmp_path_factory.mktemp("family")
            made[name] = Made(_train(texts[:1500], **FAMILIES[name]), folder, write_gguf)
        return made[name]

    return make


def _plain(texts: list[str]) -> list[str]:
    return [text for text in texts if "\x00" not in text and not any(name in text for name in _NAMES)]


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()])


def _hugging_face(proto: bytes, name: str) -> tokenizers.Tokenizer:
    """The model as the family's tokenizer.json has it; merges by transformers."""
    model = sentencepiece_model_pb2.ModelProto.FromString(proto)
    scores = {piece.piece: piece.score for piece in model.pieces}
    metaspace = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.trainer_spec.model_type == 1:
        bytes_too = bool(model.trainer_spec.byte_fallback)
        backend = tokenizers.Tokenizer(models.Unigram(list(scores.items()), model.trainer_spec.unk_id, bytes_too))
    else:
        vocab = {piece: index for index, piece in enumerate(scores)}
        merges = generate_merges(vocab, scores)
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    if name == "t5":
        charsmap = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
        single = [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
        backend.normalizer = normalizers.Sequence([charsmap, *single])
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
        backend.decoder = decoders.Metaspace("▁", "always")
    elif name == "gemma":
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(metaspace)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        backend.decoder = decoders.Sequence([*metaspace, decoders.Strip(" ", 1, 0)])
    special = [piece.piece for piece in model.pieces if piece.type in (2, 3)]
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    return backend


@pytest.mark.parametrize("name", FAMILIES)
def test_ten_thousand_strings_have_the_ids_of_the_hugging_face_form_and_come_back(
    family: Family, texts: list[str], name: str
) -> None:
    made = family(name)
    library = _hugging_face(made.proto, name)
    # Bytes by name: see below. T5's form drops one more sign from the end of a text than SentencePiece does.
    plain = [text for text in _plain(texts) if "<0x41>" not in text and not (name == "t5" and "\x85" in text)]
    for text, expected in zip(plain, library.encode_batch_fast(plain), strict=True):
        ids = made.from_gguf.encode(text)
        assert ids == expected.ids, text
        assert streamed(made.from_gguf, ids) == made.from_gguf.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("name", ["llama", "gemma", "unigram with bytes"])
def test_they_have_sentencepieces_ids_and_nothing_is_lost(family: Family, texts: list[str], name: str) -> None:
    made = family(name)
    plain = _plain(texts)
    assert len(plain) > 8000
    for text, expected in zip(plain, made.original.encode(plain), strict=True):
        ids = made.from_gguf.encode(text)
        if name != "unigram with bytes" or "<0x41>" not in text:
            assert ids == expected, text
        assert streamed(made.from_gguf, ids) == text


@pytest.mark.parametrize("name", ["llama", "gemma", "unigram with bytes"])
def test_every_code_point_comes_back(family: Family, every_code_point: list[str], name: str) -> None:
    tokenizer = family(name).from_gguf
    for text in every_code_point:
        assert streamed(tokenizer, tokenizer.encode(text)) == text.replace("▁", " ")


def test_text_that_sentencepiece_has_normalized_has_its_ids(family: Family, texts: list[str]) -> None:
    """Of text that it has not, we replace the same characters as the library: one by one, not in longer runs."""
    made = family("t5")
    once = [made.original.normalize(text).replace("▁", " ") for text in _plain(texts)]
    plain = [text for text in once if made.original.normalize(text).replace("▁", " ") == text]
    assert len(plain) > 5000
    for text, ids in zip(plain, made.original.encode(plain), strict=True):
        assert made.from_gguf.encode(text) == ids, text


@pytest.mark.parametrize("name", ["llama", "gemma", "unigram with bytes"])
def test_the_names_of_bytes_in_a_text_are_no_bytes(family: Family, name: str) -> None:
    made = family(name)
    ids = made.from_gguf.encode("a<0x41>b")
    assert made.original.piece_to_id("<0x41>") not in ids
    assert made.from_gguf.decode(ids) == "a<0x41>b"


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_names_that_a_template_wrote_are_special_tokens(family: Family, name: str) -> None:
    tokenizer = family(name).from_gguf
    text = "<s>the dog</s>  naïve 12 </s>"
    spans = tokenizer.find_special(text)
    assert len(spans) == 3
    assert tokenizer.encode_rendered(text, spans) == tokenizer.encode_rendered(text)
    ids = tokenizer.encode_rendered(text, spans[:1])
    assert [token_id for token_id in ids if token_id in (1, 2)] == [1]
    if name != "t5":
        assert tokenizer.decode(ids, skip_special_tokens=False).replace("<s> ", "<s>") == text


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_file_gives_the_ids_of_the_gguf_form(family: Family, texts: list[str], name: str) -> None:
    made = family(name)
    for text in texts[:2000]:
        assert made.from_file.encode(text) == made.from_gguf.encode(text)
    assert made.from_file.special_tokens == made.from_gguf.special_tokens
    assert made.from_file.eos_token_id == made.from_gguf.eos_token_id == 2


def test_runs_of_spaces_are_the_longest_there_are(family: Family) -> None:
    """Gemma's are symbols of their own: never part of a word, whatever the scores."""
    made = family("gemma")
    for count in range(1, 100):
        text = "a" + " " * count + "b\n\n\n" + " " * count
        assert made.from_gguf.encode(text) == made.original.encode(text)


@pytest.mark.parametrize("options", [{}, {"model_type": "bpe"}])
def test_spaces_that_are_not_kept(tmp_path: Path, texts: list[str], options: dict[str, Any]) -> None:
    """At the ends of the text, not of its lines."""
    proto = _train(texts[:1500], normalization_rule_name="identity", remove_extra_whitespaces=True, **options)
    original = sentencepiece.SentencePieceProcessor(model_proto=proto)
    tokenizer = load_tokenizer(_changed(tmp_path, proto, lambda model: None))
    for text in ("  a  b \n  c  ", " \n a", "   ", "", "\n", "a\n ", *_plain(texts[:2000])):
        assert tokenizer.encode(text, add_special_tokens=False) == original.encode(text), text


@pytest.mark.parametrize("name", FAMILIES)
def test_long_runs_take_time_in_proportion(family: Family, name: str) -> None:
    """With a cost that grows with the square of the length this would take minutes."""
    start = time.process_time()
    for run in ("x " + " " * 200_000 + "y", "a" * 100_000, "\n" * 100_000, "🫠" * 50_000, "a" + "\u0301" * 100_000):
        family(name).from_gguf.encode(run)
    assert time.process_time() - start < 10


@pytest.mark.parametrize("bytes_", [b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x99", b"a\xc3\x28b"])
def test_byte_tokens_that_are_no_text_are_streamed_as_the_library_decodes_them(family: Family, bytes_: bytes) -> None:
    for name in ("llama", "gemma", "unigram with bytes"):
        made = family(name)
        ids = [made.original.piece_to_id(f"<0x{byte:02X}>") for byte in bytes_]
        ids = [*made.from_gguf.encode("x"), *ids, *made.from_gguf.encode("y")]
        expected = _hugging_face(made.proto, name).decode(ids)
        assert streamed(made.from_gguf, ids) == made.from_gguf.decode(ids) == expected


def _changed(folder: Path, proto: bytes, change: Callable[[Any], object], **files: Any) -> Path:
    """A folder with a changed model."""
    model = sentencepiece_model_pb2.ModelProto.FromString(proto)
    change(model)
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_what_is_put_before_a_text(family: Family, tmp_path: Path) -> None:
    for name, bos in (("llama", [1]), ("unigram with bytes", [])):
        folder = _changed(tmp_path, family(name).proto, lambda model: None)
        tokenizer = load_tokenizer(folder)
        assert tokenizer.encode("the dog") == [*bos, *tokenizer.encode("the dog", add_special_tokens=False)]


def test_a_space_before_the_whole_text_only_or_before_each_part(family: Family, tmp_path: Path) -> None:
    proto = family("llama").proto
    each = load_tokenizer(_changed(tmp_path, proto, lambda model: None))
    once = load_tokenizer(_changed(tmp_path, proto, lambda model: None, tokenizer_config={"legacy": False}))
    assert each.encode("the<s>dog") != once.encode("the<s>dog")
    assert once.decode(once.encode("the<s>dog"), skip_special_tokens=True) == "thedog"
    assert each.decode(each.encode("the<s>dog"), skip_special_tokens=True) == "the dog"


def test_tokens_that_were_added_later_have_their_ids(family: Family, tmp_path: Path) -> None:
    proto = family("llama").proto
    size = family("llama").original.vocab_size()
    folder = _changed(tmp_path, proto, lambda model: None, added_tokens={"<b>": size + 1, "<a>": size, "<s>": 1})
    assert load_tokenizer(folder).encode("<a><b>", add_special_tokens=False) == [size, size + 1]
    for wrong in ({"<a>": size + 1}, {"<a>": "1"}, {"<a>": size, "<b>": size}):
        with pytest.raises(CheckpointError, match=r"added_tokens\.json: "):
            load_tokenizer(_changed(tmp_path, proto, lambda model: None, added_tokens=wrong))


def _set(name: str, value: Any) -> Callable[[Any], object]:
    spec, field = name.split(".")
    return lambda model: setattr(getattr(model, spec), field, value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_set("trainer_spec.model_type", 3), UnsupportedError, "of type word; octavo reads unigram and bpe"),
        (_set("trainer_spec.model_type", 4), UnsupportedError, "of type char"),
        (_set("trainer_spec.treat_whitespace_as_suffix", True), UnsupportedError, "spaces after words"),
        (_set("normalizer_spec.escape_whitespaces", False), UnsupportedError, "spaces after words, or as they are"),
        (_set("trainer_spec.bos_id", 10**6), CheckpointError, "bos_token has id 1000000, but there are"),
        (_set("normalizer_spec.precompiled_charsmap", b"\xff" * 9), CheckpointError, "malformed tokenizer"),
        (lambda model: model.ClearField("pieces"), CheckpointError, "there are no pieces"),
        (lambda model: model.pieces.append(model.pieces[5]), CheckpointError, "twice: ids 5 and"),
        (lambda model: setattr(model.pieces[9], "score", float("nan")), CheckpointError, "scores must hold numbers"),
        (lambda model: setattr(model.pieces[9], "piece", "a" * 5000), CheckpointError, "a token of 5000 characters"),
    ],
)
def test_models_that_are_refused(
    family: Family,
    tmp_path: Path,
    change: Callable[[Any], object],
    error: type[Exception],
    message: str,
) -> None:
    folder = _changed(tmp_path, family("llama").proto, change)
    with pytest.raises(error, match=r"tokenizer\.model: .*" + message) as caught:
        load_tokenizer(folder)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "there are no pieces"),
        (b"IQ== 0\nIg== 1\n", "malformed SentencePiece model"),  # tiktoken's form
        (b"\x0a\xff\xff\xff\xff\x7f", "truncated: 34359738367 bytes needed, 0 are left"),
        (b"\x0a", "a number is cut off"),
        (b"\x80" * 11, "a number of more than ten bytes"),
        (b"\x0b", "wire type 3"),
        (b"\x08\x01", "a number where a message is expected"),
        (b"\x0a\x02\x18\x01", "a piece without text"),
        (b"\x0a\x03\x0a\x01\xff", "can't decode byte"),
        (b"\x0a\x05\x0a\x01a\x18\x09", "a type that is none"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: .*" + message) as caught:
        load_tokenizer(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def _loaded(folder: Path) -> tuple[Exception | None, Tokenizer | None]:
    try:
        return None, load_tokenizer(folder)
    except (CheckpointError, UnsupportedError) as error:
        return error, None


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damage_is_an_error_or_harmless(family: Family, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from([family("llama").proto, family("t5").proto])))
    # Pieces fill the beginning, settings the end.
    at = data.draw(st.one_of(st.integers(0, 200), st.integers(len(raw) - 400, len(raw) - 1)))
    raw[at : at + data.draw(st.sampled_from([0, 1, 4, len(raw)]))] = data.draw(st.binary(max_size=4))
    (tmp_path / "tokenizer.model").write_bytes(raw)
    error, tokenizer = _loaded(tmp_path)
    if tokenizer is None:
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < 1000
        return
    ids = tokenizer.encode("Hello wörld 🙂\n123 ")
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_a_vocabulary_without_an_unknown_token_is_no_unigram_model(
    tmp_path: Path, family: Family, write_gguf: Write
) -> None:
    metadata = _metadata(family("t5").proto)
    del metadata["tokenizer.ggml.unknown_token_id"]
    load_tokenizer(write_gguf(tmp_path / "model.gguf", metadata))  # its type says which it is
    metadata["tokenizer.ggml.token_type"] = [1] * len(metadata["tokenizer.ggml.tokens"])
    with pytest.raises(CheckpointError, match=r"model\.gguf: a unigram vocabulary needs an unknown token"):
        load_tokenizer(write_gguf(tmp_path / "model.gguf", metadata))


def test_damage_that_only_some_texts_meet_is_an_error_of_these(
    tmp_path: Path, family: Family, write_gguf: Write
) -> None:
    """The library panics, which is no Exception: it would be the end of the thread."""
    metadata = _metadata(family("t5").proto)
    charsmap = metadata["tokenizer.ggml.precompiled_charsmap"]
    trie_bytes = int.from_bytes(bytes(charsmap[:4]), "little")
    metadata["tokenizer.ggml.precompiled_charsmap"] = charsmap[: 4 + trie_bytes + 100]  # the replacements are cut off
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", metadata))
    plain = family("t5").from_gguf.encode("the dog")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_rendered(text, [])):
        with pytest.raises(CheckpointError, match=r"model\.gguf: the tokenizer fails on this text: .*out of bounds"):
            encode("㌔")
        assert encode("the dog") == plain


def test_damage_that_every_text_meets_is_found_at_once(tmp_path: Path, family: Family, write_gguf: Write) -> None:
    metadata = _metadata(family("t5").proto) | {"tokenizer.ggml.precompiled_charsmap": [0, 0, 0, 0]}
    with pytest.raises(CheckpointError, match=r"model\.gguf: the tokenizer fails on this text: index out of bounds"):
        load_tokenizer(write_gguf(tmp_path / "model.gguf", metadata))


def test_a_charsmap_must_hold_bytes(tmp_path: Path, family: Family, write_gguf: Write) -> None:
    metadata = _metadata(family("t5").proto) | {"tokenizer.ggml.precompiled_charsmap": [1, 256, 3]}
    with pytest.raises(CheckpointError, match=r"model\.gguf: .*precompiled_charsmap must hold up to \d+ bytes"):
        load_tokenizer(write_gguf(tmp_path / "model.gguf", metadata))
