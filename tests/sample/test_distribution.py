"""Draws follow the distribution that the parameters describe: chi-square over 100,000 draws for each."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from octavo.sample import RequestChanges, Sampler, SamplingMetadata
from octavo.types import SamplingParams
from tests.sample import plain

pytestmark = pytest.mark.usefixtures("provider")

COUNT = 100_000
# 8 degrees of freedom or fewer, p = 0.001.
BOUND = 26.1
WEIGHTS = [8.0, 4.0, 2.0, 1.0, 1.0, 0.5, 0.25, 0.25, 0.25]
LOGITS = [math.log(weight) for weight in WEIGHTS]
PROMPT, OUTPUT = [0, 3, 3], [1, 1, 5]


def draws(params: SamplingParams, logits: Sequence[float] = LOGITS) -> np.ndarray:
    """How often each token is drawn, at so many positions of one request."""
    changes = RequestChanges(params, [], len(logits)).row(np.array([*PROMPT, *OUTPUT], dtype=np.int32), len(PROMPT))

    def column(value: float, kind: Any) -> np.ndarray:
        return np.full(COUNT, value, dtype=kind)

    metadata = SamplingMetadata(
        temperature=column(params.temperature, np.float64),
        min_p=column(params.min_p, np.float64),
        top_k=column(params.top_k, np.int64),
        top_p=column(params.top_p, np.float64),
        seed=column(params.seed or 0, np.int64),
        choice_index=column(0, np.int64),
        output_position=np.arange(COUNT),
        num_logprobs=column(-1, np.int64),
        changes={} if changes is None else dict.fromkeys(range(COUNT), changes),
    )
    rows = torch.tensor(logits, dtype=torch.float32).repeat(COUNT, 1)
    return np.bincount(Sampler()(rows, metadata).token_ids, minlength=len(logits))


def chi_square(counts: np.ndarray, weights: Sequence[float]) -> float:
    expected = np.array(weights) / sum(weights) * COUNT
    if counts[expected == 0].any():
        return math.inf
    some = expected > 0
    return float(((counts[some] - expected[some]) ** 2 / expected[some]).sum())


def weights_by_reference(params: SamplingParams) -> list[float]:
    return plain.weights_of(plain.changed_logits(LOGITS, params, PROMPT, OUTPUT, []), params)


# Parameters; what they should make of WEIGHTS, worked out by hand; others that a careless sampler might mean.
CASES: dict[str, tuple[dict[str, Any], list[float], dict[str, Any]]] = {
    "none": ({}, WEIGHTS, {"temperature": 1.1}),
    "cold": ({"temperature": 0.5}, [weight**2 for weight in WEIGHTS], {"temperature": 0.53}),
    "hot": ({"temperature": 2.0}, [weight**0.5 for weight in WEIGHTS], {"temperature": 1.8}),
    "top-k": ({"top_k": 3}, [8, 4, 2, 0, 0, 0, 0, 0, 0], {"top_k": 4}),
    "top-k in a tie": ({"top_k": 4}, [8, 4, 2, 1, 0, 0, 0, 0, 0], {"top_k": 5}),
    "top-p": ({"top_p": 0.9}, [8, 4, 2, 1, 1, 0, 0, 0, 0], {"top_p": 0.95}),
    "min-p": ({"min_p": 0.1}, [8, 4, 2, 1, 1, 0, 0, 0, 0], {"min_p": 0.05}),
    "min-p after temperature": (
        {"min_p": 0.3, "temperature": 2.0},
        [8**0.5, 4**0.5, 2**0.5, 1, 1, 0, 0, 0, 0],
        {"min_p": 0.3**2 * 2},
    ),
    # 14 of the 16 that min-p leaves are the first three; of all 17.25 they would not be 0.85.
    "min-p before top-p": ({"min_p": 0.1, "top_p": 0.85}, [8, 4, 2, 0, 0, 0, 0, 0, 0], {"top_p": 0.85}),
    "top-k before top-p": ({"top_k": 3, "top_p": 0.8}, [8, 4, 0, 0, 0, 0, 0, 0, 0], {"top_p": 0.8}),
    "bias": (
        {"logit_bias": {0: -math.log(8), 5: math.log(4)}},
        [1, 4, 2, 1, 1, 2, 0.25, 0.25, 0.25],
        {"logit_bias": {0: -math.log(8)}},
    ),
    "allowed": ({"allowed_token_ids": [1, 3, 8]}, [0, 4, 0, 1, 0, 0, 0, 0, 0.25], {"allowed_token_ids": [1, 3]}),
    "bad words": (
        {"bad_words_token_ids": [[0], [1, 5, 2], [5, 1], [1, 3]]},
        [0, 0, 0, 1, 1, 0.5, 0.25, 0.25, 0.25],
        {"bad_words_token_ids": [[0], [5, 1], [1, 3]]},
    ),
    "presence": (
        {"presence_penalty": 1.0},
        [8, 4 / math.e, 2, 1, 1, 0.5 / math.e, 0.25, 0.25, 0.25],
        {"frequency_penalty": 1.0},
    ),
    "frequency": (
        {"frequency_penalty": 0.5},
        [8, 4 / math.e, 2, 1, 1, 0.5 / math.e**0.5, 0.25, 0.25, 0.25],
        {"presence_penalty": 0.5},
    ),
    # Logits above zero are divided, those below multiplied; token 3 has 0. Those of prompt and output are concerned.
    "repetition": (
        {"repetition_penalty": 2.0},
        [8**0.5, 4**0.5, 2, 1, 1, 0.5**2, 0.25, 0.25, 0.25],
        {"repetition_penalty": 1.6},
    ),
    "repetition, then frequency": (
        {"repetition_penalty": 2.0, "frequency_penalty": 0.5},
        [8**0.5, 4**0.5 / math.e, 2, 1, 1, 0.5**2 / math.e**0.5, 0.25, 0.25, 0.25],
        {"repetition_penalty": 2.0},
    ),
    "bias after repetition": (
        {"repetition_penalty": 2.0, "logit_bias": {0: math.log(8)}},
        [8**1.5, 2, 2, 1, 1, 0.25, 0.25, 0.25, 0.25],
        {"repetition_penalty": 2.0, "logit_bias": {0: math.log(8) / 2}},
    ),
}


@pytest.mark.parametrize(("given", "weights", "other"), CASES.values(), ids=CASES)
def test_draws_follow_the_parameters_and_not_others(
    given: dict[str, Any], weights: list[float], other: dict[str, Any]
) -> None:
    params = SamplingParams(**{"temperature": 1.0, "seed": 11, **given})
    assert chi_square(draws(params), weights) < BOUND
    # The plain reference of the other tests means the same.
    assert weights_by_reference(params) == pytest.approx(np.array(weights) / max(weights), abs=1e-6)
    # The control: what a sampler draws that means something else is told apart.
    assert chi_square(draws(SamplingParams(**{"temperature": 1.0, "seed": 11, **other})), weights) > BOUND


def test_different_seeds_choices_and_positions_draw_independently() -> None:
    """Pairs of draws fill the table of pairs as evenly as they should."""
    flat = [0.0] * 3
    first, second = (
        Sampler()(torch.zeros(COUNT, 3), plain_metadata(seed, choice)).token_ids for seed, choice in ((5, 0), (5, 1))
    )
    other_seed = Sampler()(torch.zeros(COUNT, 3), plain_metadata(6, 0)).token_ids
    for a, b in ((first, second), (first, other_seed), (first[:-1], first[1:])):
        pairs = np.bincount(a * len(flat) + b, minlength=9)
        assert chi_square(pairs * (COUNT / len(a)), [1.0] * 9) < BOUND
    assert chi_square(np.bincount(first * 3 + first, minlength=9), [1.0] * 9) > BOUND


def plain_metadata(seed: int, choice: int) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=np.ones(COUNT),
        min_p=np.zeros(COUNT),
        top_k=np.zeros(COUNT, dtype=np.int64),
        top_p=np.ones(COUNT),
        seed=np.full(COUNT, seed),
        choice_index=np.full(COUNT, choice),
        output_position=np.arange(COUNT),
        num_logprobs=np.full(COUNT, -1),
    )
