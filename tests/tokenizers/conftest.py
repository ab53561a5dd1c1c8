"""Tokenizers made for the tests: one for each way to join tokens, in Hugging Face form and as GGUF metadata."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from octavo.tokenizers import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog looks on. 12345 67 890.",
    "Ünïcödé ñandú naïve façade – “quotes” … e\u0301 a\u0308 n\u0303",
    "שלום עולם مرحبا بالعالم नमस्ते दुनिया こんにちは世界 你好，世界 안녕하세요",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽 thumb 🇩🇪🇫🇷 🙂🙂🙂 🙃",
    "def f(x):\n    return x + 1\r\n\t# tabs\n\n\n",
]
SPECIAL = ["<|begin|>", "<|end|>", "<|中|>"]
# Not special; letters of GPT-2's byte alphabet, letters beyond it, and both.
ADDED = ["<tool_call>", "é", "Ġmark", "→", " 🙂 ", "Ã"]


# Alphabets, and pieces that tokenizers treat in ways of their own.
_ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "éñüßœŁşžïÀ¿¡«»–—…“”€£§©™½²³ǅǆºª",
    "абвгдеЖЩЪыё" + "αβγΩΣς" + "ԱԲաբ" + "ႠაბᲐ",
    "אבגדהשלוםּ" + "مرحبا\u064b\u0651لعربي" + "\u202e\u200f",
    "नमस्तेहिन्दीक्षत्रज्ञ" + "বাংলা" + "தமிழ்" + "ไทยกิน้ำ" + "ខ្មែរ",
    "漢字仮名交じり文かなカナー々〆" + "你好世界龥一，。！？" + "한국어조합각힣ㄱㅏ",
    "0123456789٣٤५६೧²Ⅷ①½〇",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "\u0301\u0308\u0323\u200d\ufe0f\u20e3\u3099",
    "\x00\x01\x07\x1b\x7f\x85\u00a0\u2028\u3000\ufeff\ufffd\ue000",
    "🙂👍🏽🇩🇪🇫🇷🫠𝔘𐍈𠀋",
]
_FRAGMENTS = [
    *(" ", "  ", "   ", " " * 7, " " * 33, "\t", "\n", "\n\n", "\r\n", "\n \n", " \n"),
    *("'s", "'LL", "'Re", "’s", "n't", "don't", "the ", " The", "ing", "HelloWorld", "XMLHttp", "e\u0301", "Å\u0308"),
    *(
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "1️⃣",
        "1234567",
        "3.14",
        "1,000",
        "2024-01-02",
        "def f(x):\n    return x+1\n",
        "a/b//c\n",
        "</div>",
    ),
    *("▁", "▁▁a", "<0x41>", "<s>", "Ġ", "http://x.y/?q=1&r=2#z", "...", "--", "!=", "안녕하세요 ", "ﬁ", "㌔", "ｶﾞ"),
]


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Strings of many scripts, the same ones in every run; hardly any is text that somebody would write."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        # Two alphabets at a time: words, and not only borders, get long.
        alphabets = draw.choices(_ALPHABETS, k=2)
        parts = []
        for _ in range(draw.randrange(9)):
            how = draw.random()
            if how < 0.4:
                parts.append("".join(draw.choices(draw.choice(alphabets), k=draw.randint(1, 6))))
            elif how < 0.9:
                parts.append(draw.choice(_FRAGMENTS))
            else:
                parts.append(chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])))
        texts.append("".join(parts))
    return texts


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return random_texts(10_000)


@pytest.fixture(scope="session")
def every_code_point() -> list[str]:
    """In strings of 256: the whole first plane, of the others, mostly empty, each 61st."""
    points = [*range(0xD800), *range(0xE000, 0x10000), *range(0x10000, 0x110000, 61)]
    return ["".join(map(chr, points[start : start + 256])) for start in range(0, len(points), 256)]


def _added(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return backend


def _byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _added(backend)


def _byte_fallback(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    # The last ones look like bytes; the library takes some of them for bytes indeed.
    pieces += ["▁", "a", "é", "▁a", "▁▁", "▁▁▁b", "🙂", "עו", "\u0301", "<0x+a>", "<0xff>", "<0xZZ>", "<0xé>", "<0x1>"]
    # A hole in the ids.
    vocab = {piece: index if index < 260 else index + 2 for index, piece in enumerate(["<unk>", *pieces])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    return _added(backend)


def _pieces(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    pieces = ["<unk>", "▁", "▁the", "▁▁", "a", "##b", "##", "n't", " do", "'s", ".", " !", "🙂", "א", "\u0301", "x▁y"]
    backend = tokenizers.Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, "<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    return _added(backend)


def _unigram() -> tokenizers.Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "é", "▁a", "▁▁", "🙂", "עו", "\u0301"]
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -2.5) for piece in pieces], 0, True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([*_LLAMA, decoders.Strip(" ", 1, 0)])
    return _added(backend)


_LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
_MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": _byte_level,
    "byte-fallback": lambda: _byte_fallback(decoders.Sequence(_LLAMA)),
    "byte-fallback, one space stripped": lambda: _byte_fallback(
        decoders.Sequence([*_LLAMA, decoders.Strip(" ", 1, 0)])
    ),
    "byte-fallback, two strips": lambda: _byte_fallback(
        decoders.Sequence([*_LLAMA, decoders.Strip(" ", 2, 0), decoders.Strip("a", 1, 0)])
    ),
    "byte-fallback, bytes first": lambda: _byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])),
    "byte-fallback, then metaspace": lambda: _byte_fallback(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ),
    "byte-fallback, then strip and replace": lambda: _byte_fallback(
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip("a", 2, 0), decoders.Replace("\ufffd", "?▁")])
    ),
    "unigram": _unigram,
    "metaspace": lambda: _pieces(decoders.Metaspace()),
    "metaspace, never prepended": lambda: _pieces(decoders.Metaspace("▁", "never", False)),
    "metaspace of a letter": lambda: _pieces(decoders.Metaspace("a", "first", False)),
    "word pieces": lambda: _pieces(decoders.WordPiece("##", True)),
    "regex, then bytes": lambda: _pieces(
        decoders.Sequence([decoders.Replace(Regex("[▁x]+"), "Ġ"), decoders.ByteLevel()])
    ),
    "strip": lambda: _pieces(decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.Fuse()])),
    "none": lambda: _pieces(None),
}
DECODERS = list(_MAKERS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "decoder" in metafunc.fixturenames:
        metafunc.parametrize("decoder", DECODERS, scope="session")


class Pair:
    """A tokenizer, and the library's own over the same file."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Name of a decoder → Pair."""
    made: dict[str, Pair] = {}

    def make(name: str) -> Pair:
        if name not in made:
            folder = tmp_path_factory.mktemp("tokenizer")
            _MAKERS[name]().save(str(folder / "tokenizer.json"))
            made[name] = Pair(folder)
        return made[name]

    return make


@pytest.fixture(scope="session")
def pair(make_pair: Callable[[str], Pair], decoder: str) -> Pair:
    return make_pair(decoder)


def _write_folder(folder: Path, backend: tokenizers.Tokenizer | str, config: Any = None, **files: Any) -> Path:
    text = backend if isinstance(backend, str) else backend.to_str()
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        name = name.replace("__", ".")
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    """``write_folder(backend, config, special_tokens_map__json=…)`` → folder in Hugging Face form."""
    return lambda *args, **files: _write_folder(tmp_path, *args, **files)


@pytest.fixture(scope="session")
def byte_level_json() -> str:
    return str(_byte_level().to_str())


def _write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """A file without tensors, by the format's own package."""
    writer = gguf.GGUFWriter(str(path), metadata.get("general.architecture", "llama"))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def write_gguf() -> Callable[[Path, dict[str, Any]], Path]:
    return _write_gguf


@pytest.fixture
def load_gguf(tmp_path: Path) -> Callable[[dict[str, Any]], Tokenizer]:
    """GGUF metadata → Tokenizer, by way of a file."""
    return lambda metadata: load_tokenizer(_write_gguf(tmp_path / "model.gguf", metadata))


def byte_level_metadata() -> dict[str, Any]:
    """A small vocabulary of kind "gpt2"."""
    state = json.loads(_byte_level().to_str())
    vocab = state["model"]["vocab"] | {entry["content"]: entry["id"] for entry in state["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [
        3 if token in SPECIAL else 4 if token in ADDED and token not in state["model"]["vocab"] else 1
        for token in tokens
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|begin|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|end|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


@pytest.fixture(scope="session")
def gpt2_metadata() -> dict[str, Any]:
    return byte_level_metadata()


def _train_sentence_piece(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=model,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _sentence_piece_metadata(model: str, processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    def kind(index: int) -> int:
        if processor.is_unknown(index):
            return 2
        if processor.is_control(index):
            return 3
        return 6 if processor.is_byte(index) else 1

    ids = range(processor.vocab_size())
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [processor.id_to_piece(index) for index in ids],
        "tokenizer.ggml.scores": [processor.get_score(index) for index in ids],
        "tokenizer.ggml.token_type": [kind(index) for index in ids],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
    }


@pytest.fixture(scope="session")
def sentence_piece() -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE model with byte fallback, made as Llama's was: text is taken as it is."""
    return _train_sentence_piece(model_type="bpe", vocab_size=520, byte_fallback=True, split_digits=True)


@pytest.fixture(scope="session")
def llama_metadata(sentence_piece: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """The same model as GGUF metadata of kind "llama"."""
    return _sentence_piece_metadata("llama", sentence_piece)


@pytest.fixture(scope="session")
def t5_metadata() -> dict[str, Any]:
    """A unigram model as GGUF metadata of kind "t5"."""
    unigram = _train_sentence_piece(model_type="unigram", vocab_size=200)
    text_form = {"add_space_prefix": True, "remove_extra_whitespaces": True}
    return _sentence_piece_metadata("t5", unigram) | {f"tokenizer.ggml.{k}": v for k, v in text_form.items()}
