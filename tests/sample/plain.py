"""What a request must get from its logits, in plain Python and double precision, one token after the other.

Written from the meaning of the parameters, and shares nothing with the sampler but the random number generator, which
has tests of its own.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.sample import uniforms
from octavo.types import PositionLogprobs, SamplingParams

INF = math.inf


def sum_in_order(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:  # not sum(): it compensates rounding errors since Python 3.12
        total += value
    return total


def rounded(value: float) -> float:
    """To single precision, in which logits are kept."""
    return float(np.float32(value))


def changed_logits(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int]
) -> list[float]:
    """The logits that temperature and filters act on."""
    changed = []
    generated = Counter(output)
    for token_id, logit in enumerate(logits):
        value = logit
        if token_id in generated or token_id in prompt:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * generated[token_id]
        value -= params.presence_penalty if token_id in generated else 0.0
        value = rounded(rounded(value) + params.logit_bias.get(token_id, 0.0))
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            value = -INF
        if len(output) < params.min_tokens and (token_id in eos or token_id in params.stop_token_ids):
            value = -INF
        if any(ends_with(output, word[:-1]) and token_id == word[-1] for word in params.bad_words_token_ids):
            value = -INF
        changed.append(value)
    return changed


def ends_with(output: Sequence[int], tail: Sequence[int]) -> bool:
    return len(tail) <= len(output) and list(output[len(output) - len(tail) :]) == list(tail)


def by_likelihood(logits: Sequence[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))


def weights_of(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """What each token is drawn in proportion to."""
    best = max(logits)
    weights = [math.exp(0.0 if logit == best else (logit - best) / params.temperature) for logit in logits]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    kept = by_likelihood(logits)
    total = sum_in_order(weights)
    if 0 < params.top_k < len(logits):
        kept = kept[: params.top_k]
        total = sum_in_order([weights[token_id] for token_id in kept])
    if params.top_p < 1.0:
        nucleus, mass = [], 0.0
        for token_id in kept:
            nucleus.append(token_id)
            mass += weights[token_id]
            if mass >= total * params.top_p:
                break
        kept = nucleus
    chosen = set(kept)
    return [weight if token_id in chosen else 0.0 for token_id, weight in enumerate(weights)]


def next_token(logits: Sequence[float], params: SamplingParams, choice_index: int, position: int) -> int:
    """The token that is sampled from ``changed_logits``."""
    if params.greedy:
        return by_likelihood(logits)[0]
    weights = weights_of(logits, params)
    key: list[Any] = [np.array([value]) for value in (params.seed, choice_index, position)]
    point = float(uniforms(*key)[0]) * sum_in_order(weights)
    mass = 0.0
    for token_id, weight in enumerate(weights):
        mass += weight
        if mass > point:
            return token_id
    raise AssertionError("the point is beyond the total")


def raw_logprobs(
    logits: Sequence[float], token_id: int, num_logprobs: int | None, named: Sequence[int] | None = None
) -> PositionLogprobs | None:
    """Logprobs of ``token_id`` and of what was asked for beside it; -1: the whole vocabulary."""
    if num_logprobs is None and named is None:
        return None
    order = by_likelihood(logits)
    best = logits[order[0]]
    total = math.log(math.fsum(math.exp(logit - best) for logit in logits))
    listed = order[: len(logits) if num_logprobs == -1 else num_logprobs or 0] if named is None else list(named)
    ids = [token_id, *listed]
    values = [logits[each] - best - total for each in ids]
    ranks = [order.index(each) + 1 for each in listed] if named is not None else []
    return PositionLogprobs(ids, values, order.index(token_id) + 1, ranks)
