"""How byte-level GGUF vocabularies cut text into words before merging: one entry for each value of
``tokenizer.ggml.pre``. The expressions are part of the models, as published with them.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from octavo.errors import UnsupportedError

__all__ = ["PreTokenizerKind", "pre_tokenizer_kind"]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Words that keep together what is written in one case, then small letters.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")

_DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = f"{_CONTRACTIONS}|{_WORD}|{_THREE_DIGITS}|{_OTHERS}|{_SPACES}"
_QWEN2 = f"{_CONTRACTIONS}|{_WORD}|{_DIGIT}|{_OTHERS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = (
    f"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|{_THREE_DIGITS}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_SEED = rf"{_CONTRACTIONS}|{_WORD}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
# Chinese, then as GPT-4o without it.
_NO_HAN = r"&&[^\p{Han}]]"
_KIMI = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NO_HAN}*{_LOWER[:-1]}{_NO_HAN}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NO_HAN}+{_LOWER[:-1]}{_NO_HAN}*{_CONTRACTIONS}?"
    f"|{_THREE_DIGITS}|{_OTHERS}|{_SPACES}"
)
# What GGUF means by no kind at all: runs of punctuation, GPT-2's words, digits in threes.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)
_DEEPSEEK3 = (
    _THREE_DIGITS,
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)


@dataclass(frozen=True, slots=True)
class PreTokenizerKind:
    """One kind.

    Attributes:
        patterns: applied one after the other, each cutting what the one before left; every match is a word.
        spelt_patterns: as `patterns`, but after the bytes have been spelt in GPT-2's alphabet.
        ignore_merges: a word that is a token is that token, whatever the merges say.
        add_bos: whether a beginning-of-sequence token is put before a text if the file does not say.
        compose: the model was trained on text in Unicode's composed form (NFC).
    """

    patterns: tuple[str, ...]
    spelt_patterns: tuple[str, ...] = ()
    ignore_merges: bool = False
    add_bos: bool = False
    compose: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*_splits(self.patterns), byte_level, *_splits(self.spelt_patterns)])


def _splits(patterns: tuple[str, ...]) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


# GGUF's "superbpe" is not here: its expression takes the square of the length of a number.
_KINDS = {
    "default": PreTokenizerKind(_DEFAULT),
    "gpt-2": PreTokenizerKind((_GPT2,)),
    "olmo": PreTokenizerKind((_GPT2,), compose=True),  # GPT-NeoX's, also Pythia's
    "smollm": PreTokenizerKind((_DIGIT, _GPT2)),
    "command-r": PreTokenizerKind((_DIGIT, _GPT2), compose=True),
    "llama-bpe": PreTokenizerKind((_LLAMA3,), ignore_merges=True, add_bos=True),
    "smaug-bpe": PreTokenizerKind((_LLAMA3,), ignore_merges=True),  # as Llama 3 without a first token, also SmolLM3's
    "dbrx": PreTokenizerKind((_LLAMA3,)),  # GPT-4's, also Phi-4's and OLMo 2's
    "tekken": PreTokenizerKind((_TEKKEN,), ignore_merges=True, add_bos=True),
    "qwen2": PreTokenizerKind((_QWEN2,), compose=True),
    "qwen35": PreTokenizerKind((_QWEN35,), compose=True),
    "deepseek-r1-qwen": PreTokenizerKind((_QWEN2,)),
    "gpt-4o": PreTokenizerKind((_GPT4O,)),  # also Phi-4-mini's
    "falcon": PreTokenizerKind((r"[\p{P}$+<=>^`|~]+", _GPT2), spelt_patterns=(r"\p{N}+", r"[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizerKind(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizerKind(_DEEPSEEK3),
    "bloom": PreTokenizerKind((_BLOOM,)),
    "viking": PreTokenizerKind((_BLOOM, _DIGIT)),
    "bailingmoe": PreTokenizerKind((_BAILING,)),
    "seed-coder": PreTokenizerKind((_SEED,)),
    "kimi-k2": PreTokenizerKind((_KIMI,)),
}
_OTHER_NAMES = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("starcoder", "refact", "codeshell", "exaone", "minerva-7b"), "smollm"),  # refact: also Granite's
    **dict.fromkeys(("phi-2", "jais", "trillion", "exaone4", "granite-docling", "mellum", "gigachat"), "gpt-2"),
    **dict.fromkeys(("glm4", "chatglm-bpe"), "dbrx"),
    **dict.fromkeys(("llama4", "kanana2", "minimax-m2"), "gpt-4o"),
    **dict.fromkeys(("hunyuan", "megrez", "grok-2", "solar-open"), "deepseek-r1-qwen"),
    **dict.fromkeys(("poro-chat", "gpt3-finnish"), "bloom"),
    **dict.fromkeys(("bailingmoe2", "llada-moe"), "bailingmoe"),
    "mpt": "olmo",
    "mistral-bpe": "tekken",
    "stablelm2": "qwen2",
    "hunyuan-dense": "deepseek-v3",
}


def pre_tokenizer_kind(name: str) -> PreTokenizerKind:
    """The kind that a file names.

    Raises:
        UnsupportedError: octavo does not have it; it says which there are.
    """
    kind = _KINDS.get(_OTHER_NAMES.get(name, name))
    if kind is None:
        supported = ", ".join(sorted([*_KINDS, *_OTHER_NAMES]))
        raise UnsupportedError(
            f"pre-tokenizer kind {name!r} (tokenizer.ggml.pre) is not supported; supported: {supported}"
        )
    return kind
