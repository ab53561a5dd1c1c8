"""Small random models whose shapes exceed every blocking constant, and one way to run requests and read the step trace.

hidden 80 and intermediate 208 leave a tail under any tile of 16, 32 or 64; prompts of 600 to 700 tokens need three
attention partitions of 256; the vocabulary of 1,100 is more than two chunks of 512.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo import RequestOutput, SamplingParams
from octavo.attention import Attention

VOCAB_SIZE = 1100
PROMPT_LEN = 650
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
    def graph_modes(self) -> set[str]:
        """How the steps' forwards ran."""
        return {step["graph_mode"] for step in self.trace}

    @property
    def preemptions(self) -> int:
        return sum(len(step["preempted"]) for step in self.trace)


Runner = Callable[..., Run]


def greedy(max_tokens: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=5, ignore_eos=True, **more)


def seeded(seed: int, max_tokens: int = 24, **more: Any) -> SamplingParams:
    filters = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, **more}
    return SamplingParams(seed=seed, max_tokens=max_tokens, logprobs=5, ignore_eos=True, **filters)


def assert_same(left: RequestOutput, right: RequestOutput) -> None:
    """Same tokens, same text, same end; the same logprobs to the last bit, and so the same ranks. The same of the
    prompt's logprobs."""
    assert_same_prompt_logprobs(left, right)
    assert len(left.outputs) == len(right.outputs)
    for a, b in zip(left.outputs, right.outputs, strict=True):
        assert a.token_ids == b.token_ids
        assert a.text == b.text
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert a.logprobs is not None
        assert a.logprobs == b.logprobs
        assert a.cumulative_logprob == b.cumulative_logprob


def assert_same_prompt_logprobs(left: RequestOutput, right: RequestOutput) -> None:
    for output in (left, right):
        assert output.prompt_logprobs is None or len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert left.prompt_logprobs == right.prompt_logprobs
