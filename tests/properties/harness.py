"""Small random models whose shapes exceed every blocking constant, and one way to run requests and read the step trace.

hidden 80 and intermediate 208 leave a tail under any tile of 16, 32 or 64; prompts of 600 to 700 tokens need three
attention partitions of 256; the vocabulary of 1,100 is more than two chunks of 512.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo import RequestOutput, SamplingParams
from octavo.attention import Attention
from octavo.types import Logprob

VOCAB_SIZE = 1100
PROMPT_LEN = 650
NEAR_TIE = 1e-4  # logprobs so close may change places
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 80,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.1,
}


def byte_tokenizer(path: Path) -> None:
    """A byte-level vocabulary without merges, padded with words that no text contains."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, **{symbol: 2 + index for index, symbol in enumerate(alphabet)}}
    vocab.update({f"⟨unused{index}⟩": index for index in range(len(vocab), VOCAB_SIZE)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def save_model(path: Path, model: transformers.PreTrainedModel) -> Path:
    model.save_pretrained(path)
    byte_tokenizer(path)
    return path


def with_window(window: int | None) -> Any:
    """In place of a Llama's ``Attention``: a window in the second layer only."""

    def make(name: str, **settings: Any) -> Attention:
        second = name.startswith("model.layers.1.")
        return Attention(name, **{**settings, "sliding_window": window if second else None})

    return make


def prompt(seed: int, length: int = PROMPT_LEN) -> list[int]:
    """Random ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()


@dataclass
class Run:
    """Outputs in the order of the prompts, and the step trace."""

    outputs: list[RequestOutput]
    trace: list[dict[str, Any]]

    def scheduled(self, prompt_index: int = 0) -> list[int]:
        """Tokens that each step computed for one request."""
        wanted = self.outputs[prompt_index].request_id
        return [r["scheduled"] for step in self.trace for r in step["requests"] if r["id"] == wanted]

    @property
    def preemptions(self) -> int:
        return sum(len(step["preempted"]) for step in self.trace)


Runner = Callable[..., Run]


def greedy(max_tokens: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=5, ignore_eos=True, **more)


def seeded(seed: int, max_tokens: int = 24, **more: Any) -> SamplingParams:
    filters = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, **more}
    return SamplingParams(seed=seed, max_tokens=max_tokens, logprobs=5, ignore_eos=True, **filters)


def assert_same(left: RequestOutput, right: RequestOutput, tolerance: float = 1e-5) -> None:
    """Same tokens, same text, same end; logprobs within ``tolerance``, ranks equal but for near ties. The same of the
    prompt's logprobs."""
    assert_same_prompt_logprobs(left, right, tolerance)
    assert len(left.outputs) == len(right.outputs)
    for a, b in zip(left.outputs, right.outputs, strict=True):
        assert a.token_ids == b.token_ids
        assert a.text == b.text
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=tolerance * len(a.token_ids))
        for here, there in zip(a.logprobs, b.logprobs, strict=True):
            assert_same_table(here, there, tolerance)


def assert_same_prompt_logprobs(left: RequestOutput, right: RequestOutput, tolerance: float = 1e-5) -> None:
    if left.prompt_logprobs is None or right.prompt_logprobs is None:
        assert left.prompt_logprobs is right.prompt_logprobs
        return
    for output in (left, right):
        assert len(output.prompt_logprobs or []) == len(output.prompt_token_ids)
    for here, there in zip(left.prompt_logprobs, right.prompt_logprobs, strict=True):
        if here is None or there is None:
            assert here is there is left.prompt_logprobs[0]
        else:
            assert_same_table(here, there, tolerance)


def assert_same_table(here: dict[int, Logprob], there: dict[int, Logprob], tolerance: float) -> None:
    common = here.keys() & there.keys()
    assert len(common) >= len(here) - 1  # the last of the listed may change places with the next in a near tie
    by_rank = {entry.rank: entry.logprob for entry in here.values()}
    for token_id in common:
        mine, other = here[token_id], there[token_id]
        assert mine.logprob == pytest.approx(other.logprob, abs=tolerance)
        assert mine.rank is not None
        assert other.rank is not None
        if mine.rank != other.rank:
            assert abs(mine.rank - other.rank) == 1
            # Who had that rank here must be as likely. Below the listed ones nobody knows who it was.
            assert by_rank.get(other.rank, mine.logprob) == pytest.approx(mine.logprob, abs=NEAR_TIE)
