"""Logits of tiny random models against transformers in float32: at once, in chunks, token by token, and in a batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.folders import changed_config
from tests.models.through_engine import VOCAB_SIZE, assert_engine_continues_as_transformers

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 256}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "one KV head": {"num_key_value_heads": 1},
    "as many KV heads": {"num_key_value_heads": 6},
    "tied head": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "MLP bias": {"mlp_bias": True},
    "all biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "wide heads": {"head_dim": 40},
    "narrow heads": {"head_dim": 6},
    "base and epsilon": {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 1234.5}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {"head_dim": 32, "rope_parameters": YARN},
    "yarn, exact bounds": {"head_dim": 32, "rope_parameters": YARN | {"truncate": False, "beta_fast": 20.0}},
    "yarn, magnitudes": {"head_dim": 32, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn, attention factor": {"head_dim": 32, "rope_parameters": YARN | {"attention_factor": 1.4}},
    "sliding window": {"family": "Mistral", "sliding_window": 23},
    "window of one block": {"family": "Mistral", "sliding_window": 16},
    "no window, wide heads": {"family": "Mistral", "sliding_window": None, "head_dim": 20},
}
NUM_TOKENS = 100


@pytest.fixture(params=VARIANTS, scope="module")
def variant(request: pytest.FixtureRequest, make_model: Callable[..., Path]) -> Path:
    return make_model(**VARIANTS[request.param])


def assert_same(got: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


def test_logits_equal_transformers(
    variant: Path, paged_model: Any, expected_logits: Any, random_tokens: Callable[..., list[int]]
) -> None:
    model = paged_model(variant)
    tokens = random_tokens(NUM_TOKENS)
    expected = expected_logits(variant, tokens)
    assert expected.std() > 0.5  # logits near zero would be equal whatever the model does
    for chunk_size in (NUM_TOKENS, 1, 16, 17):
        assert_same(model.chunked(tokens, chunk_size), expected)


@pytest.mark.parametrize("fields", [{}, {"family": "Mistral", "sliding_window": 301}])
def test_long_prompts_equal_transformers(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, fields: dict[str, Any]
) -> None:
    path = make_model(**fields)
    tokens = random_tokens(700)
    model = paged_model(path)
    expected = expected_logits(path, tokens)
    assert_same(model.chunked(tokens, 700), expected)
    assert_same(model.chunked(tokens, 333), expected)


@pytest.mark.parametrize("fields", [{}, {"family": "Mistral", "sliding_window": 23}])
def test_a_batch_of_prompts_chunks_and_decodes_equals_each_alone(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, fields: dict[str, Any]
) -> None:
    path = make_model(**fields)
    model = paged_model(path)
    tokens = {name: random_tokens(60, seed) for seed, name in enumerate("abcd")}
    parts = [
        {"a": (0, 31), "b": (0, 1)},
        {"b": (1, 2), "c": (0, 17), "a": (31, 32)},
        {"d": (0, 2), "a": (32, 33), "c": (17, 60), "b": (2, 3)},
        {"a": (33, 34), "b": (3, 4), "d": (2, 3)},
        {"b": (4, 60), "a": (34, 60), "d": (3, 60)},
    ]
    got: dict[str, list[Tensor]] = {name: [] for name in tokens}
    for part in parts:
        logits = model.step([(name, tokens[name][begin:end]) for name, (begin, end) in part.items()])
        sizes = [end - begin for begin, end in part.values()]
        for name, rows in zip(part, logits.split(sizes), strict=True):
            got[name].append(rows)
    for name, ids in tokens.items():
        assert_same(torch.cat(got[name]), expected_logits(path, ids))


@pytest.mark.parametrize("block_size", [1, 8, 32, 128])
def test_block_size_does_not_matter(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, block_size: int
) -> None:
    path = make_model(family="Mistral", sliding_window=23)
    model = paged_model(path, block_size=block_size)
    tokens = random_tokens(50)
    assert_same(model.chunked(tokens, 17), expected_logits(path, tokens))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints_in_float32(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, dtype: str
) -> None:
    path = make_model(dtype=dtype, tie_word_embeddings=True)
    tokens = random_tokens(40)
    assert_same(paged_model(path).chunked(tokens, 40), expected_logits(path, tokens))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_checkpoint_in_bfloat16(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, dtype: str
) -> None:
    path = make_model(dtype=dtype)
    model = paged_model(path, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}
    tokens = random_tokens(40)
    got, expected = model.chunked(tokens, 17), expected_logits(path, tokens)
    assert got.dtype == torch.float32
    divergence = torch.nn.functional.kl_div(
        got.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none"
    )
    assert divergence.sum(-1).mean() < 0.02


@pytest.mark.parametrize("variant", ["grouped queries", "sliding window", "window of one block"])
def test_the_engine_continues_as_transformers(make_model: Any, variant: str) -> None:
    assert_engine_continues_as_transformers(make_model(**VARIANTS[variant], vocab_size=VOCAB_SIZE))


def test_a_tied_head_is_stored_once(make_model: Any, paged_model: Any) -> None:
    model = paged_model(make_model(tie_word_embeddings=True)).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_attention_layers_are_named_and_in_order(make_model: Any, paged_model: Any) -> None:
    model = paged_model(make_model(num_hidden_layers=12))
    assert list(model.layers) == [f"model.layers.{index}.self_attn" for index in range(12)]


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10100.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 1.01}},
        {"rms_norm_eps": 1.1e-2},
        {"sliding_window": 24},
    ],
)
def test_control_a_slightly_wrong_config_fails(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, fields: dict[str, Any]
) -> None:
    path = make_model(family="Mistral", sliding_window=23, rms_norm_eps=1e-2)
    tokens = random_tokens(NUM_TOKENS)
    expected = expected_logits(path, tokens)
    assert_same(paged_model(path).chunked(tokens, NUM_TOKENS), expected)
    got = paged_model(changed_config(path, **fields)).chunked(tokens, NUM_TOKENS)
    with pytest.raises(AssertionError):
        assert_same(got, expected)
