"""StableLM against transformers in float32: partial rotation, parallel residual, norms of the heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.checkpoints import read_model_facts
from octavo.errors import CheckpointError
from tests.models.through_engine import VOCAB_SIZE, assert_engine_continues_as_transformers

BASE = {"family": "StableLm", "hidden_size": 96}  # heads of 16


def rotated(share: float, theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}}


VARIANTS: dict[str, dict[str, Any]] = {
    "a quarter rotated": {},
    "half rotated": rotated(0.5, 1234.5),
    "all rotated": rotated(1.0),
    "qkv bias, tied": {"use_qkv_bias": True, "tie_word_embeddings": True},
    "norms of heads": {"qk_layernorm": True},
    "parallel": {"use_parallel_residual": True, "layer_norm_eps": 1e-2},
    "parallel, norms of heads, bias": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
}
NUM_TOKENS = 100


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def changed_config(path: Path, **fields: Any) -> Path:
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, variant: str
) -> None:
    path = make_model(**BASE, **VARIANTS[variant])
    tokens = random_tokens(NUM_TOKENS)
    expected = expected_logits(path, tokens)
    assert expected.std() > 0.5  # logits near zero would be equal whatever the model does
    model = paged_model(path)
    for chunk_size in (NUM_TOKENS, 1, 16, 17):
        assert_same(model.chunked(tokens, chunk_size), expected)


@pytest.mark.parametrize(
    "fields",
    [
        rotated(0.5),
        rotated(0.25, 10100.0),
        {"layer_norm_eps": 1.5e-2},
    ],
)
def test_control_a_slightly_wrong_config_fails(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, fields: dict[str, Any]
) -> None:
    path = make_model(**BASE, **VARIANTS["parallel"])
    tokens = random_tokens(NUM_TOKENS)
    expected = expected_logits(path, tokens)
    got = paged_model(changed_config(path, **fields)).chunked(tokens, NUM_TOKENS)
    with pytest.raises(AssertionError):
        assert_same(got, expected)


def test_a_config_of_its_first_days_has_the_factor_outside(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any
) -> None:
    path = make_model(**BASE, **rotated(0.5))
    tokens = random_tokens(40)
    expected = expected_logits(path, tokens)
    changed_config(path, rope_parameters=None, rope_theta=10000, partial_rotary_factor=0.5)
    assert_same(paged_model(path).chunked(tokens, 17), expected)


def test_half_a_pair_cannot_be_rotated(make_model: Any) -> None:
    path = changed_config(make_model(**BASE), **rotated(0.2))  # 3 channels of 16
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        read_model_facts(path)


@pytest.mark.parametrize("variant", ["a quarter rotated", "parallel, norms of heads, bias"])
def test_the_engine_continues_as_transformers(make_model: Any, variant: str) -> None:
    assert_engine_continues_as_transformers(make_model(**BASE, **VARIANTS[variant], vocab_size=VOCAB_SIZE))
