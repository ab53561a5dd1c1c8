"""Specification: a GGUF file's byte-level tokenizer gives the ids of the same model's Hugging Face tokenizer.

The published vocabularies are too large for a test. So a small one is made for each way to cut text into words, with
that way as the models' tokenizer.json has it, and written down in both forms.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from octavo.errors import UnsupportedError
from octavo.tokenizers import IncrementalDetokenizer, Tokenizer, load_tokenizer

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _spell() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Digits(individual_digits=True)


def _split(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    return [*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns), _spell()]


Steps = list[pre_tokenizers.PreTokenizer]
# tokenizer.ggml.pre → (the steps of tokenizer.json's pre-tokenizer, whether it composes text first). The models that
# octavo runs come first.
FAMILIES: dict[str, tuple[Steps, bool]] = {
    "llama-bpe": (_split(_LLAMA3), False),  # Llama 3
    "smaug-bpe": (_split(_LLAMA3), False),  # SmolLM 3
    "smollm": ([_digits(), _gpt2()], False),  # SmolLM 2
    "tekken": (_split(_TEKKEN), False),  # Mistral
    "qwen2": (_split(_QWEN2), True),  # Qwen 2, 2.5 and 3
    "dbrx": (_split(_LLAMA3), False),  # Phi-4, OLMo 2
    "gpt-4o": (_split(_O200K), False),  # Phi-4-mini
    "refact": ([_digits(), _gpt2()], False),  # Granite
    "stablelm2": (_split(_QWEN2), True),
    "olmo": ([_gpt2()], True),  # GPT-NeoX, Pythia
    "gpt-2": ([_gpt2()], False),
}
OTHERS: dict[str, tuple[Steps, bool]] = {
    "falcon": (
        [
            pre_tokenizers.Punctuation("contiguous"),
            _gpt2(),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ],
        False,
    ),
    "command-r": ([_digits(), _gpt2()], True),
    "mpt": ([_gpt2()], True),
    "qwen35": (_split(_QWEN35), True),
    "deepseek-r1-qwen": (_split(_QWEN2), False),
    "deepseek-coder": (
        [*_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")[:-1], _digits(), _spell()],
        False,
    ),
    "deepseek-v3": (_split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3), False),
    "bloom": (_split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), False),
    "bailingmoe": (_split(_BAILING), False),
    "seed-coder": (_split(_SEED), False),
    "kimi-k2": (_split(_KIMI), False),
}

LONG_RUNS = [
    *(unit * 15_000 for unit in ("a", "A", "aA", ".", "\n", " \n", "\r\n ", "漢", "'s", " .", "/")),
    *("1" * 60_000, " " * 60_000 + "x", "A" * 60_000 + "1", "\t" * 60_000 + "x"),
]
Forms = Callable[[str], tuple[tokenizers.Tokenizer, Path]]


def _train(steps: Steps, compose: bool, texts: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    if compose:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _metadata(backend: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    state = json.loads(backend.to_str())
    vocab = state["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == "<|end|>" else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": vocab["<|end|>"],
    }


@pytest.fixture(scope="module")
def forms(
    tmp_path_factory: pytest.TempPathFactory,
    write_gguf: Callable[[Path, dict[str, Any]], Path],
    texts: list[str],
) -> Forms:
    """tokenizer.ggml.pre → (the tokenizer in Hugging Face's form, by their library; the path of the GGUF form)."""
    made: dict[str, tuple[tokenizers.Tokenizer, Path]] = {}

    def make(pre: str) -> tuple[tokenizers.Tokenizer, Path]:
        if pre not in made:
            backend = _train(*(FAMILIES | OTHERS)[pre], texts[:1500])
            path = tmp_path_factory.mktemp("family") / "model.gguf"
            made[pre] = backend, write_gguf(path, _metadata(backend, pre))
        return made[pre]

    return make


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()])


def _compare(forms: Forms, pre: str, texts: list[str]) -> None:
    library, path = forms(pre)
    tokenizer = load_tokenizer(path)
    expected = [encoding.ids for encoding in library.encode_batch_fast(texts)]
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text) == ids, text
    # The way back is the same for all of them; the test below goes it with every string.
    for ids in expected[::10]:
        assert tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("pre", FAMILIES)
def test_ten_thousand_strings_have_the_ids_of_the_hugging_face_form(forms: Forms, texts: list[str], pre: str) -> None:
    _compare(forms, pre, texts)


@pytest.mark.parametrize("pre", OTHERS)
def test_so_they_have_for_other_kinds(forms: Forms, texts: list[str], pre: str) -> None:
    _compare(forms, pre, texts[-1000:])


def test_each_string_comes_back_whole_and_piece_by_piece(forms: Forms, texts: list[str]) -> None:
    library, path = forms("llama-bpe")
    tokenizer = load_tokenizer(path)
    for text in texts:
        ids = tokenizer.encode(text)
        assert streamed(tokenizer, ids) == library.decode(ids) == text


# Of those that cut alike, one.
@pytest.mark.parametrize("pre", ["llama-bpe", "smollm", "tekken", "qwen2", "gpt-4o", "gpt-2", "deepseek-v3", "kimi-k2"])
def test_long_runs_take_time_in_proportion(forms: Forms, pre: str) -> None:
    """With a cost that grows with the square of the length this would take minutes."""
    tokenizer = load_tokenizer(forms(pre)[1])
    start = time.process_time()
    for run in LONG_RUNS:
        tokenizer.encode(run)
    assert time.process_time() - start < 10


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm"])
def test_every_code_point_comes_back(forms: Forms, every_code_point: list[str], pre: str) -> None:
    tokenizer = load_tokenizer(forms(pre)[1])
    for text in every_code_point:
        assert streamed(tokenizer, tokenizer.encode(text)) == text


# Kinds that cut alike.
ALIKE = [{"llama-bpe", "smaug-bpe", "dbrx"}, {"smollm", "refact"}, {"qwen2", "stablelm2"}]


@pytest.mark.parametrize("pre", FAMILIES)
def test_control_no_other_kind_gives_the_same_ids(
    forms: Forms, tmp_path: Path, write_gguf: Callable[[Path, dict[str, Any]], Path], texts: list[str], pre: str
) -> None:
    library, _ = forms(pre)
    expected = [encoding.ids for encoding in library.encode_batch_fast(texts[:2000])]
    alike = next((group for group in ALIKE if pre in group), {pre})
    for other in FAMILIES.keys() - alike:
        tokenizer = load_tokenizer(write_gguf(tmp_path / f"{other}.gguf", _metadata(library, other)))
        assert any(tokenizer.encode(text) != ids for text, ids in zip(texts, expected, strict=False)), other


def test_an_unknown_kind_is_refused_and_the_known_ones_are_named(
    forms: Forms, tmp_path: Path, write_gguf: Callable[[Path, dict[str, Any]], Path]
) -> None:
    library, _ = forms("gpt-2")
    with pytest.raises(UnsupportedError, match="'klingon'") as caught:
        load_tokenizer(write_gguf(tmp_path / "model.gguf", _metadata(library, "klingon")))
    listed = str(caught.value).partition("supported: ")[2].split(", ")
    assert set(listed) >= {*FAMILIES, *OTHERS, "default"}
    for name in listed:
        load_tokenizer(write_gguf(tmp_path / "model.gguf", _metadata(library, name)))
