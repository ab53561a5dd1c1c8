"""How byte-level GGUF vocabularies cut text into words before merging: one entry for each value of
``tokenizer.ggml.pre``. The expressions are part of the models, as published with them.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from octavo.errors import UnsupportedError

__all__ = ["PreTokenizerKind", "pre_tokenizer_kind"]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What GGUF means by no kind at all: runs of punctuation, GPT-2's words, digits in threes.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizerKind:
    """One kind.

    Attributes:
        patterns: applied one after the other, each cutting what the one before left; every match is a word.
        ignore_merges: a word that is a token is that token, whatever the merges say.
        add_bos: whether a beginning-of-sequence token is put before a text if the file does not say.
        compose: the model was trained on text in Unicode's composed form (NFC).
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    compose: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])


_KINDS = {
    "default": PreTokenizerKind(_DEFAULT),
    "gpt-2": PreTokenizerKind((_GPT2,)),
    "smollm": PreTokenizerKind((r"\p{N}", _GPT2)),
    "llama-bpe": PreTokenizerKind((_LLAMA3,), ignore_merges=True, add_bos=True),
    "tekken": PreTokenizerKind((_TEKKEN,), ignore_merges=True, add_bos=True),
    "qwen2": PreTokenizerKind((_QWEN2,), compose=True),
    "deepseek-r1-qwen": PreTokenizerKind((_QWEN2,)),
}
_OTHER_NAMES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "mistral-bpe": "tekken"}


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
