"""What is asked: made-up prompts of exact length, the conversations of a ShareGPT file, or the prompts of a JSONL file.

Random prompts are token ids where the route takes them (completions), which is exact whatever the tokenizer does; else
text that the tokenizer makes exactly so many tokens of.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from octavo.bench.serve.random_text import RandomText
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.tokenizers import Tokenizer

__all__ = ["DATASETS", "BenchPrompt", "DatasetOptions", "read_prompts"]

DATASETS = ("random", "sharegpt", "custom")

_T = TypeVar("_T")

# Of a ShareGPT file are taken: prompts and answers of at least so many tokens, and at most so many.
_SHORTEST, _LONGEST_PROMPT, _LONGEST_TOTAL = 4, 1024, 2048


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """See ``octavo bench serve --help``. ``as_text``: random prompts are to be text, not token ids."""

    name: str = "random"
    path: Path | None = None
    num_prompts: int = 1000
    seed: int = 0
    as_text: bool = False
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: tuple[float, float] = (0.0, 0.0)
    random_prefix_len: int = 0
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256
    oversample: bool = True
    shuffle: bool = True


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """``num_tokens``: of the prompt; None where it is for the server to say."""

    prompt: str | list[int]
    num_tokens: int | None
    output_len: int


def read_prompts(
    options: DatasetOptions, load_tokenizer: "Callable[[], Tokenizer]", warn: Callable[[str], None]
) -> list[BenchPrompt]:
    """``options.num_prompts`` of them, the same for the same seed.

    Args:
        load_tokenizer: called where one is needed: not for custom data.
        warn: told what is not as it was asked for.

    Raises:
        ConfigError: an option, or the file, is not as it must be.
    """
    if options.name == "random":
        return _random(options, load_tokenizer())
    if options.path is None:
        raise ConfigError(f"--dataset-name {options.name} needs --dataset-path FILE")
    found = _sharegpt(options, load_tokenizer()) if options.name == "sharegpt" else _custom(options)
    if len(found) < options.num_prompts:
        lacking = f"{options.path} has {len(found)} prompts that can be used, not {options.num_prompts}"
        if not found or not options.oversample:
            raise ConfigError(f"--dataset-path: {lacking}; lower --num-prompts")
        warn(f"{lacking}: some are sent more than once (a prefix cache will show it)")
        draw = random.Random(options.seed)
        found = found + draw.choices(found, k=options.num_prompts - len(found))
    return found


def _random(options: DatasetOptions, tokenizer: "Tokenizer") -> list[BenchPrompt]:
    draw = random.Random(options.seed)
    source = (RandomText if options.as_text else _RandomIds)(tokenizer, draw)
    shared = source.words(options.random_prefix_len)
    prompts = []
    for _ in range(options.num_prompts):
        num_tokens = len(shared) + _about(draw, options.random_input_len, options.random_range_ratio[0])
        output_len = _about(draw, options.random_output_len, options.random_range_ratio[1])
        prompts.append(BenchPrompt(source.prompt(shared, num_tokens), num_tokens, output_len))
    return prompts


def _about(draw: random.Random, length: int, ratio: float) -> int:
    """Evenly between ``length`` less and more this share of itself."""
    return draw.randint(max(1, int(length * (1 - ratio))), max(1, -int(-length * (1 + ratio) // 1)))


class _RandomIds:
    """Random ids of a tokenizer's vocabulary, without its special tokens."""

    def __init__(self, tokenizer: "Tokenizer", draw: random.Random) -> None:
        special = tokenizer.special_token_ids
        self._ids = [each for each in range(tokenizer.vocab_size) if each not in special]
        self._draw = draw

    def words(self, count: int) -> list[int]:
        return self._draw.choices(self._ids, k=count)

    def prompt(self, beginning: list[int], num_tokens: int) -> list[int]:
        return beginning + self.words(num_tokens - len(beginning))


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def _sharegpt(options: DatasetOptions, tokenizer: "Tokenizer") -> list[BenchPrompt]:
    """The first turn of each conversation is the prompt, the length of the second that of the answer."""
    assert options.path is not None
    try:
        entries = msgspec.json.decode(_read(options.path), type=list[_Conversation])
    except msgspec.MsgspecError as error:
        expected = '[{"conversations": [{"value": "…"}, {"value": "…"}]}, …]'
        raise ConfigError(f"--dataset-path {options.path}: {error}; expected {expected}") from error
    found: list[BenchPrompt] = []
    for entry in _in_order(options, [each for each in entries if len(each.conversations) >= 2]):
        if len(found) == options.num_prompts:
            break
        prompt, answer = (turn.value for turn in entry.conversations[:2])
        num_tokens = len(tokenizer.encode(prompt))
        stated = options.sharegpt_output_len
        output_len = len(tokenizer.encode(answer)) if stated is None else stated
        too_short = num_tokens < _SHORTEST or (stated is None and output_len < _SHORTEST)
        if not (too_short or num_tokens > _LONGEST_PROMPT or num_tokens + output_len > _LONGEST_TOTAL):
            found.append(BenchPrompt(prompt, num_tokens, output_len))
    return found


class _Line(msgspec.Struct):
    prompt: str | list[int]
    output_tokens: int | None = None


def _custom(options: DatasetOptions) -> list[BenchPrompt]:
    """A line: ``{"prompt": "…", "output_tokens": 10}``; the second counts where --custom-output-len is -1."""
    assert options.path is not None
    found = []
    for number, line in enumerate(_read(options.path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"--dataset-path {options.path}, line {number}"
        try:
            entry = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f'{where}: {error}; expected {{"prompt": "…", "output_tokens": 10}}') from error
        output_len = entry.output_tokens if options.custom_output_len == -1 else options.custom_output_len
        if output_len is None or output_len < 1:
            raise ConfigError(f"{where}: with --custom-output-len -1 it must say output_tokens, at least 1")
        if not entry.prompt:
            raise ConfigError(f"{where}: the prompt is empty")
        found.append(
            BenchPrompt(entry.prompt, len(entry.prompt) if isinstance(entry.prompt, list) else None, output_len)
        )
    return _in_order(options, found)[: options.num_prompts]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error.strerror}") from error


def _in_order(options: DatasetOptions, entries: list[_T]) -> list[_T]:
    """Shuffled, unless the file's order is wanted."""
    if options.shuffle:
        random.Random(options.seed).shuffle(entries)
    return entries
