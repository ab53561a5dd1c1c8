"""Fixtures that every room may use: tiny random models in Hugging Face form, made once a session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_llama import write_tiny_llama

collect_ignore = ["clients"]  # `make test-clients` runs them, with a Python of their own


@pytest.fixture(scope="session")
def make_tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_tiny_llama(seed=0, **LlamaConfig fields)`` → folder of a random model with tokenizer and chat template."""

    def make(seed: int = 0, **overrides: Any) -> Path:
        return write_tiny_llama(tmp_path_factory.mktemp("tiny_llama"), seed, **overrides)

    return make


@pytest.fixture(scope="session")
def tiny_llama_dir(make_tiny_llama: Callable[..., Path]) -> Path:
    """A float32 Llama: 384 tokens of vocabulary at most, 2 layers, hidden 64, 512 positions, end of sequence 2."""
    return make_tiny_llama()
