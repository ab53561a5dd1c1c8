"""The sampling kernel on every level: what the torch definition gives, in the same bits whatever the rows beside a row
and however many threads; each row for itself."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import kernels
from octavo.sample import RowChanges, Sampler, SamplerOutput, SamplingMetadata, uniforms
from octavo.sample import definition as torch_definition
from octavo.types import SamplingParams
from tests.kernels import amx
from tests.sample.test_changes import metadata_of, random_batch
from tests.sample.test_sampler import random_logits

INF, NAN = math.inf, math.nan
CHUNK = 8192
GROUP = 256
SIZES = [1, 2, 15, 17, GROUP - 1, GROUP, GROUP + 1, 3000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 300]
UseThreads = Callable[[int], None]

few = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(scope="module", params=amx.native_levels(), autouse=True)
def use_threads(request: pytest.FixtureRequest) -> Iterator[UseThreads]:
    """Calling it chooses the number of threads."""
    with pytest.MonkeyPatch.context() as patch, amx.level(request.param):
        patch.setenv("OCTAVO_CPU_ISA", request.param)

        def use(count: int) -> None:
            patch.setenv("OMP_NUM_THREADS", str(count))
            patch.setattr("os.sched_getaffinity", lambda pid: set(range(count)))
            kernels.select("native")

        use(2)
        yield use
        kernels.select("torch")


def demands(count: int, **columns: Any) -> SamplingMetadata:
    """The same for all rows, or what is given as an array."""

    def column(name: str, other: float, kind: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(columns.get(name, other), dtype=kind), count).copy()

    return SamplingMetadata(
        temperature=column("temperature", 0.0, np.float64),
        min_p=column("min_p", 0.0, np.float64),
        top_k=column("top_k", 0, np.int64),
        top_p=column("top_p", 1.0, np.float64),
        seed=column("seed", 7, np.int64),
        choice_index=column("choice_index", 0, np.int64),
        output_position=column("output_position", 0, np.int64),
        num_logprobs=column("num_logprobs", -1, np.int64),
        changes=columns.get("changes", {}),
        logprob_token_ids=columns.get("logprob_token_ids", {}),
    )


def assert_same(found: SamplerOutput, expected: SamplerOutput) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.errors.keys() == expected.errors.keys()
    assert found.logprobs.keys() == expected.logprobs.keys()
    for row, logprobs in found.logprobs.items():
        other = expected.logprobs[row]
        assert (logprobs.token_ids, logprobs.ranks) == (other.token_ids, other.ranks)
        assert logprobs.sampled_rank == other.sampled_rank
        np.testing.assert_allclose(logprobs.logprobs, other.logprobs, rtol=0, atol=4e-6, equal_nan=False)


# against the definition ---------------------------------------------------------------------------------------------


@few
@given(
    vocab_size=st.sampled_from([size for size in SIZES if size > 20]),
    count=st.integers(1, 7),
    seed=st.integers(0, 9999),
)
def test_random_requests_get_what_the_definition_gives(vocab_size: int, count: int, seed: int) -> None:
    logits, params, tokens = random_batch(vocab_size, count, seed)
    metadata = metadata_of(params, tokens, vocab_size)
    assert_same(Sampler()(logits, metadata), torch_definition.sample(logits.clone(), metadata))


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.95},
    {"top_k": 2999, "top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 0.3, "top_p": 0.7},
    {"min_p": 1.0},
    {"min_p": 1e-9, "top_k": 1500, "top_p": 0.99},
]


def rows_to_filter(vocab_size: int) -> torch.Tensor:
    """Peaked, even, flat, tied and extreme rows."""
    count = 24
    logits = random_logits(count, vocab_size, seed=vocab_size)
    logits[4:8] *= 0.05
    logits[8:12] = 0.0
    logits[12:16] = logits[12:16].round()
    logits[16:18, ::3] = INF
    logits[18:20, vocab_size // 2 + 1 :] = -INF
    logits[20:22] *= 1e30
    logits[22] = -0.0
    logits[22, ::2] = 0.0
    return logits


def demands_to_filter(filters: int) -> SamplingMetadata:
    return demands(24, temperature=0.9, seed=np.arange(24), **FILTERS[filters])


@functools.cache  # the same for all levels
def filtered(vocab_size: int, filters: int) -> SamplerOutput:
    return torch_definition.sample(rows_to_filter(vocab_size), demands_to_filter(filters))


@pytest.mark.parametrize("filters", range(len(FILTERS)), ids=lambda filters: str(FILTERS[filters]))
@pytest.mark.parametrize("vocab_size", SIZES)
def test_every_filter_draws_what_the_definition_draws(vocab_size: int, filters: int) -> None:
    found = Sampler()(rows_to_filter(vocab_size), demands_to_filter(filters))
    assert_same(found, filtered(vocab_size, filters))


def test_control_another_parameter_draws_another_token() -> None:
    logits = random_logits(64, 3000, spread=0.5)
    metadata = demands(64, temperature=0.9, top_k=40, seed=np.arange(64))
    expected = torch_definition.sample(logits.clone(), metadata)
    assert_same(Sampler()(logits, metadata), expected)
    for other in ({"top_k": np.full(64, 41)}, {"temperature": np.full(64, 0.95)}, {"top_p": np.full(64, 0.98)}):
        assert Sampler()(logits, replace(metadata, **other)).token_ids.tolist() != expected.token_ids.tolist()


def test_the_random_numbers_are_those_of_the_definition() -> None:
    """Evenly likely tokens tell the upper bits of the number."""
    rng = np.random.default_rng(0)
    count, vocab_size = 300, 1 << 14
    seed = np.concatenate([[0, 1, -1, 2**63 - 1, -(2**63), 1 << 32], rng.integers(-(2**63), 2**63 - 1, count - 6)])
    choice, position = rng.integers(0, 16384, count), rng.integers(0, 2**31, count)
    metadata = demands(count, temperature=1.0, seed=seed, choice_index=choice, output_position=position)
    found = Sampler()(torch.zeros(count, vocab_size), metadata).token_ids
    assert found.tolist() == (uniforms(seed, choice, position) * vocab_size).astype(np.int64).tolist()


def listings(
    sample: Callable[..., SamplerOutput], score: Callable[..., SamplerOutput], *case: int
) -> list[SamplerOutput]:
    """What ``sample`` and ``score`` list for (vocabulary, number of logprobs)."""
    vocab_size, num_logprobs = case
    logits = random_logits(5, vocab_size, seed=1)
    logits[1] = logits[1].round()
    logits[2] = 3.0
    logits[3, ::2] = -INF
    logits[4, vocab_size // 2] = INF
    named = {0: np.array([0, vocab_size - 1, 0, vocab_size // 2]), 1: np.arange(min(vocab_size, 1024))[::-1].copy()}
    metadata = demands(5, temperature=0.8, num_logprobs=num_logprobs, seed=np.arange(5))
    wanted = (metadata, replace(metadata, logprob_token_ids=named))
    listed = [sample(logits.clone(), each) for each in wanted]
    return [*listed, score(logits, np.arange(5) % vocab_size, metadata.num_logprobs)]


@functools.cache  # the same for all levels
def defined_listings(vocab_size: int, num_logprobs: int) -> list[SamplerOutput]:
    return listings(torch_definition.sample, torch_definition.score, vocab_size, num_logprobs)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 700, 10**6])
def test_listed_logprobs_are_those_of_the_definition(vocab_size: int, num_logprobs: int) -> None:
    found = listings(Sampler(), Sampler.score, vocab_size, num_logprobs)
    for each, expected in zip(found, defined_listings(vocab_size, num_logprobs), strict=True):
        assert_same(each, expected)


# the same bits ------------------------------------------------------------------------------------------------------


def bits(output: SamplerOutput) -> list[Any]:
    return [output.token_ids.tolist(), output.errors, output.logprobs]


@pytest.mark.parametrize(("count", "vocab_size"), [(1, 3 * CHUNK + 5), (3, 49_152), (300, 2 * CHUNK + 33)])
def test_one_thread_and_two_give_the_same_bits(use_threads: UseThreads, count: int, vocab_size: int) -> None:
    logits, params, tokens = random_batch(vocab_size, count, seed=4)
    for each in params:  # whole vocabularies of 300 rows take long to list
        each.logprobs = None if each.logprobs is None else min(each.logprobs, 17) if each.logprobs > 0 else 3
    metadata = metadata_of(params, tokens, vocab_size)
    use_threads(1)
    one = bits(Sampler()(logits, metadata))
    use_threads(2)
    assert bits(Sampler()(logits, metadata)) == one
    # The control: bits are compared.
    logits[0, :] += 1e-3 * torch.arange(vocab_size)
    assert bits(Sampler()(logits, metadata)) != one


@few
@given(vocab_size=st.sampled_from([257, CHUNK + 1, 2 * CHUNK + 77]), count=st.integers(2, 30), seed=st.integers(0, 99))
def test_a_row_alone_is_the_row_in_a_crowd_bit_for_bit(vocab_size: int, count: int, seed: int) -> None:
    logits, params, tokens = random_batch(vocab_size, count, seed)
    together = Sampler()(logits, metadata_of(params, tokens, vocab_size))
    for index in {0, count // 2, count - 1}:
        row = slice(index, index + 1)
        alone = Sampler()(logits[row], metadata_of(params[row], tokens[row], vocab_size))
        assert alone.token_ids[0] == together.token_ids[index]
        assert alone.logprobs.get(0) == together.logprobs.get(index)
        assert alone.errors.get(0) == together.errors.get(index)


def test_rows_may_lie_apart() -> None:
    wide = random_logits(6, 5000)
    metadata = demands(6, temperature=0.9, top_p=0.8, num_logprobs=3)
    apart, together = wide[:, :4000], wide[:, :4000].contiguous()
    assert bits(Sampler()(apart, metadata)) == bits(Sampler()(together, metadata))


# ties and broken rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", SIZES)
def test_greedy_ties_go_to_the_lower_id(vocab_size: int) -> None:
    places = sorted({0, vocab_size // 3, vocab_size // 2, vocab_size - 1})
    logits = torch.full((len(places), vocab_size), -1.0)
    for row, first in enumerate(places):
        logits[row, places[row:]] = -0.0
        logits[row, first + 1 :: 2] = 0.0
    assert Sampler()(logits, demands(len(places))).token_ids.tolist() == places


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_anywhere_fails_its_row_and_no_other(vocab_size: int, temperature: float) -> None:
    places = sorted({0, vocab_size // 2, vocab_size - 1})
    logits = random_logits(2 * len(places), vocab_size)
    whole = logits.clone()
    for index, place in enumerate(places):
        logits[2 * index + 1, place] = NAN
    metadata = demands(len(logits), temperature=temperature, top_p=0.9, num_logprobs=2)
    found, expected = Sampler()(logits, metadata), Sampler()(whole, metadata)
    assert sorted(found.errors) == [2 * index + 1 for index in range(len(places))]
    assert expected.errors == {}
    for row in range(0, len(logits), 2):
        assert found.token_ids[row] == expected.token_ids[row]
        assert found.logprobs[row] == expected.logprobs[row]
        assert found.token_ids[row + 1] == -1
        assert row + 1 not in found.logprobs


def test_nothing_to_do_is_done() -> None:
    output = Sampler()(torch.empty(0, 50), demands(0))
    assert (output.token_ids.tolist(), output.errors, output.logprobs) == ([], {}, {})


# hygiene ------------------------------------------------------------------------------------------------------------


def test_nothing_of_a_step_is_left_for_the_next() -> None:
    """One sampler over many steps gives what a new one gives for each."""
    sampler = Sampler()
    for seed in range(12):
        vocab_size = [40, 9000, 300][seed % 3]
        logits, params, tokens = random_batch(vocab_size, 1 + seed % 5, seed)
        metadata = metadata_of(params, tokens, vocab_size)
        before = logits.clone()
        assert bits(sampler(logits, metadata)) == bits(Sampler()(logits, metadata))
        assert torch.equal(logits, before)


# refused calls ------------------------------------------------------------------------------------------------------


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_ids_beyond_the_vocabulary_are_refused(wrong: int) -> None:
    logits = torch.zeros(2, 50)
    refused = [
        demands(2, changes={0: RowChanges(banned_ids=ids(3, wrong))}),
        demands(2, changes={1: RowChanges(bias_ids=ids(wrong), bias=np.ones(1))}),
        demands(2, num_logprobs=0, logprob_token_ids={1: ids(0, wrong)}),
    ]
    for metadata in refused:
        with pytest.raises(IndexError, match="must be below 50"):
            Sampler()(logits, metadata)
    with pytest.raises(IndexError, match="must be below 2"):
        Sampler()(logits, demands(2, changes={2: RowChanges(banned_ids=ids(3))}))
    with pytest.raises(IndexError, match="must be below 50"):
        Sampler.score(logits, ids(0, wrong), ids(1, 1))


def test_arrays_of_other_types_and_sizes_are_refused() -> None:
    metadata = demands(2)
    with pytest.raises(ValueError, match="top_k is int32"):
        Sampler()(torch.zeros(2, 50), replace(metadata, top_k=metadata.top_k.astype(np.int32)))
    with pytest.raises(ValueError, match="seed is int64"):
        Sampler()(torch.zeros(2, 50), replace(metadata, seed=metadata.seed[:1]))
    with pytest.raises(ValueError, match="logits are"):
        Sampler()(torch.zeros(2, 50, dtype=torch.float64), metadata)
    with pytest.raises(ValueError, match="forbidden is bool"):
        Sampler()(torch.zeros(2, 50), demands(2, changes={0: RowChanges(forbidden=np.zeros(49, dtype=bool))}))


def test_changes_are_those_of_the_request_alone() -> None:
    """Penalties, bias and bans of neighbours, in every order, change nobody else."""
    vocab_size = 600
    params = [
        SamplingParams(temperature=0.0, seed=1, repetition_penalty=1.7, frequency_penalty=0.3),
        SamplingParams(temperature=0.0, seed=1, allowed_token_ids=[4, 5, 6]),
        SamplingParams(temperature=0.0, seed=1, logit_bias={9: 50.0}, logprobs=1),
        SamplingParams(temperature=0.0, seed=1, logprobs=1),
    ]
    tokens = [([1, 2], [3, 3, 4])] * 4
    logits = random_logits(1, vocab_size).expand(4, -1).contiguous()
    found = Sampler()(logits, metadata_of(params, tokens, vocab_size))
    assert found.token_ids[1] in (4, 5, 6)
    assert found.token_ids[2] == 9
    assert found.token_ids[3] == logits[3].argmax()
    assert found.logprobs[2].logprobs[1] == found.logprobs[3].logprobs[1]
    order = [3, 1, 0, 2]
    again = Sampler()(logits, metadata_of([params[i] for i in order], tokens, vocab_size))
    assert again.token_ids.tolist() == found.token_ids[order].tolist()
