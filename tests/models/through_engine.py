"""Greedy continuations through the whole engine, against transformers' forward of the growing sequence."""

from pathlib import Path
from typing import Any

import torch
import transformers

from octavo import LLM, SamplingParams
from tests.properties.harness import VOCAB_SIZE, byte_tokenizer, prompt

__all__ = ["VOCAB_SIZE", "assert_engine_continues_as_transformers"]

PROMPT_LEN = 70
NUM_TOKENS = 10
BLOCK_SIZE = 16


def expected_tokens(folder: Path, tokens: list[int]) -> list[int]:
    """What transformers picks in float32, without a KV cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = list(tokens)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([found]), use_cache=False).logits[0, -1]
            best, second = logits.topk(2).values.tolist()
            assert best - second > 1e-3  # a near tie would say nothing
            found.append(int(logits.argmax()))
    return found[len(tokens) :]


def assert_engine_continues_as_transformers(folder: Path, model: Path | None = None) -> None:
    """The model of ``folder`` (or of the GGUF file ``model``, made from it) continues a prompt whole, with its prefix
    cached, and in chunks of 1, 16 and 17 tokens."""
    if model is None:
        byte_tokenizer(folder)
    tokens = prompt(seed=3, length=PROMPT_LEN)
    expected = expected_tokens(folder, tokens)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_memory_bytes": 1 << 22,
        "disable_log_stats": True,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 1,
    }
    for budget in (512, 1, 16, 17):
        with LLM(str(model or folder), max_num_batched_tokens=budget, **settings) as llm:
            rounds = [llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)[0] for _ in range(2)]
        for output in rounds:
            assert output.outputs[0].token_ids == expected
        assert rounds[0].num_cached_tokens == 0
        assert rounds[1].num_cached_tokens == PROMPT_LEN // BLOCK_SIZE * BLOCK_SIZE
