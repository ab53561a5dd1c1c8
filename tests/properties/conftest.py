"""The models of the property tests, and the fixture that runs requests on them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM
from tests.properties.harness import SHAPE, Run, Runner, save_model


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE)
    return save_model(tmp_path_factory.mktemp("llama"), transformers.LlamaForCausalLM(config).float())


@pytest.fixture(scope="session")
def sliding_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mistral with a window that is neither a multiple of the block size nor of a partition."""
    torch.manual_seed(1)
    config = transformers.MistralConfig(**SHAPE, sliding_window=301)
    return save_model(tmp_path_factory.mktemp("mistral"), transformers.MistralForCausalLM(config).float())


@pytest.fixture(params=["llama", "sliding"])
def model_dir(request: pytest.FixtureRequest, llama_dir: Path, sliding_dir: Path) -> Path:
    return llama_dir if request.param == "llama" else sliding_dir


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    """``run(model, prompts, params, rounds=1, priority=None, **options)``; of several rounds the last counts."""
    counter = itertools.count()

    def run_once(
        model: Path,
        prompts: list[list[int]],
        params: Any,
        rounds: int = 1,
        priority: list[int] | None = None,
        **options: Any,
    ) -> Run:
        trace = tmp_path / f"trace{next(counter)}.jsonl"
        settings = {
            "dtype": "float32",
            "seed": 0,
            "kv_cache_memory_bytes": 1 << 24,
            "max_num_batched_tokens": 2048,
            **options,
        }
        with LLM(str(model), step_trace=str(trace), disable_log_stats=True, **settings) as llm:
            inputs = [{"prompt_token_ids": ids} for ids in prompts]
            for _ in range(rounds):
                skip = len(trace.read_text().splitlines()) if trace.exists() else 0
                outputs = llm.generate(inputs, params, use_tqdm=False, priority=priority)
        return Run(outputs, [json.loads(line) for line in trace.read_text().splitlines()[skip:]])

    return run_once
