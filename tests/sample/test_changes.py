"""Changes of the logits, and logprobs in all their forms: exact, independent of the neighbours, free where unused."""

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sample import RequestChanges, RowChanges, Sampler, SamplerOutput, SamplingMetadata
from octavo.types import NO_TOKEN_LEFT, SamplingParams
from octavo.worker.peak_memory import PeakMemory
from tests.sample import plain
from tests.sample.test_sampler import Recorder, random_logits, torch_only

pytestmark = pytest.mark.usefixtures("provider")

EOS = [2]


def metadata_of(
    params: list[SamplingParams], tokens: list[tuple[list[int], list[int]]], vocab_size: int
) -> SamplingMetadata:
    """What requests ask that have a prompt and an output so far."""

    def column(values: list[Any], kind: Any) -> np.ndarray:
        return np.array(values, dtype=kind)

    changes: dict[int, RowChanges] = {}
    for index, (each, (prompt, output)) in enumerate(zip(params, tokens, strict=True)):
        if RequestChanges.used_by(each):
            row = RequestChanges(each, EOS, vocab_size).row(np.array(prompt + output, dtype=np.int32), len(prompt))
            changes |= {} if row is None else {index: row}
    named = {
        index: np.array(each.logprob_token_ids, dtype=np.int64)
        for index, each in enumerate(params)
        if each.logprob_token_ids is not None
    }
    listed = [vocab_size if each.logprobs == -1 else each.logprobs for each in params]
    return SamplingMetadata(
        temperature=column([0.0 if each.greedy else each.temperature for each in params], np.float64),
        min_p=column([each.min_p for each in params], np.float64),
        top_k=column([each.top_k for each in params], np.int64),
        top_p=column([each.top_p for each in params], np.float64),
        seed=column([each.seed for each in params], np.int64),
        choice_index=column([0] * len(params), np.int64),
        output_position=column([len(output) for _, output in tokens], np.int64),
        num_logprobs=column([0 if i in named else -1 if n is None else n for i, n in enumerate(listed)], np.int64),
        logprob_token_ids=named,
        changes=changes,
    )


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Any parameters; a third of the requests are plain."""
    if rng.random() < 0.33:
        return SamplingParams(seed=int(rng.integers(1 << 40)), temperature=float(rng.choice([0.0, 1.0])), logprobs=2)

    def ids(most: int) -> list[int]:
        return rng.choice(vocab_size, size=int(rng.integers(1, most)), replace=False).tolist()

    def some(value: Any, other: Any) -> Any:
        return value if rng.random() < 0.4 else other

    named = some(ids(5), None)
    return SamplingParams(
        seed=int(rng.integers(1 << 40)),
        temperature=float(rng.choice([0.0, 0.8, 1.5])),
        repetition_penalty=some(1.4, 1.0),
        frequency_penalty=some(0.7, 0.0),
        presence_penalty=some(-0.6, 0.0),
        logit_bias=some({token_id: float(rng.normal()) * 3 for token_id in ids(9)}, {}),
        allowed_token_ids=some([*ids(vocab_size // 2), 5, 6, 7], None),
        bad_words_token_ids=some([[int(token_id)] for token_id in ids(4)] + [[9, 5], [9, 9, 6]], []),
        min_tokens=some(4, 0),
        stop_token_ids=ids(3),
        min_p=some(0.03, 0.0),
        top_k=some(20, 0),
        top_p=some(0.9, 1.0),
        logprobs=None if named is not None else int(rng.choice([0, 3, 17, -1])),
        logprob_token_ids=named,
    )


def random_batch(
    vocab_size: int, count: int, seed: int
) -> tuple[torch.Tensor, list[SamplingParams], list[tuple[list[int], list[int]]]]:
    rng = np.random.default_rng(seed)
    tokens = [
        (rng.integers(0, vocab_size, 12).tolist(), [*rng.integers(0, vocab_size, int(rng.integers(9))).tolist(), 9])
        for _ in range(count)
    ]
    return random_logits(count, vocab_size, seed), [random_params(rng, vocab_size) for _ in range(count)], tokens


# against the plain reference ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(vocab_size=st.sampled_from([24, 90, 1500]), count=st.integers(1, 8), seed=st.integers(0, 10_000))
def test_random_batches_get_what_the_plain_reference_gives(vocab_size: int, count: int, seed: int) -> None:
    logits, params, tokens = random_batch(vocab_size, count, seed)
    output = Sampler()(logits.clone(), metadata_of(params, tokens, vocab_size))
    for index, (each, (prompt, generated)) in enumerate(zip(params, tokens, strict=True)):
        raw = logits[index].tolist()
        changed = plain.changed_logits(raw, each, prompt, generated, EOS)
        if max(changed) == -math.inf:
            assert output.errors[index] == NO_TOKEN_LEFT
            continue
        token_id = plain.next_token(changed, each, 0, len(generated))
        assert output.token_ids[index] == token_id
        expected = plain.raw_logprobs(raw, token_id, each.logprobs, each.logprob_token_ids)
        found = output.logprobs[index]
        assert expected is not None
        assert (found.token_ids, found.ranks) == (expected.token_ids, expected.ranks)
        assert found.sampled_rank == expected.sampled_rank
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


# independence -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(vocab_size=st.sampled_from([33, 1100, 5003]), count=st.integers(2, 16), seed=st.integers(0, 10_000))
def test_a_row_alone_is_the_row_in_a_crowd_bit_for_bit(vocab_size: int, count: int, seed: int) -> None:
    logits, params, tokens = random_batch(vocab_size, count, seed)
    together = Sampler()(logits.clone(), metadata_of(params, tokens, vocab_size))
    for index in range(count):
        row = slice(index, index + 1)
        alone = Sampler()(logits[row].clone(), metadata_of(params[row], tokens[row], vocab_size))
        assert alone.token_ids[0] == together.token_ids[index]
        assert alone.logprobs.get(0) == together.logprobs.get(index)
        assert alone.errors.get(0) == together.errors.get(index)


def test_more_pairs_than_are_changed_at_once_are_changed_all() -> None:
    vocab_size, count = 150_000, 9
    assert vocab_size * count > 1 << 20
    bias = dict.fromkeys(range(vocab_size - 1), -100.0)
    params = [SamplingParams(temperature=0.0, seed=0, logit_bias=bias)] * count
    metadata = metadata_of(params, [([1], [])] * count, vocab_size)
    logits = random_logits(count, vocab_size)
    assert set(Sampler()(logits, metadata).token_ids.tolist()) == {vocab_size - 1}


@pytest.mark.parametrize("vocab_size", [24, 1500])
def test_the_logits_are_the_same_afterwards(vocab_size: int) -> None:
    logits, params, tokens = random_batch(vocab_size, 8, 3)
    before = logits.clone()
    Sampler()(logits, metadata_of(params, tokens, vocab_size))
    assert torch.equal(logits, before)


# what is not used costs nothing -------------------------------------------------------------------------------------


def ops_of(params: list[SamplingParams]) -> list[tuple[str, tuple[int, ...]]]:
    logits, metadata = random_logits(len(params), 100), metadata_of(params, [([1, 2], [3])] * len(params), 100)
    with Recorder() as recorder:
        Sampler()(logits, metadata)
    return [(name, shape) for name, shape in recorder.calls if shape == (len(params), 100) or shape == (100,)]


FEATURES: list[dict[str, Any]] = [
    {"repetition_penalty": 2.0},
    {"frequency_penalty": 1.0},
    {"presence_penalty": 1.0},
    {"logit_bias": {4: 1.0}},
    {"allowed_token_ids": [4, 5]},
    {"bad_words_token_ids": [[4]]},
    {"min_tokens": 3},
    {"logprobs": -1},
    {"logprob_token_ids": [3]},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 3},
]


@torch_only
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: next(reversed(feature)))
def test_one_row_with_a_feature_costs_the_others_nothing(feature: dict[str, Any]) -> None:
    """Operations over the whole batch are those of the plain batch, and reads and writes of single rows."""
    plain_one, user = (
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(**{"temperature": 0.0, "seed": 0, **feature}),
    )
    assert [name for name, _ in ops_of([plain_one] * 5)] == ["argmax", "gather"]
    touched = {name for name, shape in ops_of([plain_one, plain_one, user, plain_one, plain_one]) if shape == (5, 100)}
    assert touched <= {"argmax", "gather", "index_select", "index_copy_", "index", "index_put_", "select"}


@torch_only
def test_changes_that_do_not_apply_now_are_none() -> None:
    def row(output: list[int], **params: Any) -> RowChanges | None:
        return RequestChanges(SamplingParams(**params), EOS, 50).row(np.array([1, *output], dtype=np.int32), 1)

    assert row([7], min_tokens=1) is None
    assert row([], min_tokens=1) is not None
    assert row([7, 8], bad_words_token_ids=[[8, 7, 9]]) is None
    assert row([8, 7], bad_words_token_ids=[[8, 7, 9]]) is not None
    assert row([], presence_penalty=1.0) is None
    assert row([7], presence_penalty=1.0) is not None
    assert not RequestChanges.used_by(SamplingParams(top_k=3, min_p=0.1, logprobs=3, seed=1))


_IDS = st.integers(0, 2)


@torch_only
@given(
    words=st.lists(st.lists(_IDS, min_size=1, max_size=5), min_size=1, max_size=6), output=st.lists(_IDS, max_size=7)
)
def test_bad_words_ban_their_last_tokens_behind_their_others(words: list[list[int]], output: list[int]) -> None:
    changes = RequestChanges(SamplingParams(bad_words_token_ids=words), EOS, 50).row(
        np.array([0, 1, 2, 0, *output], dtype=np.int32), 4
    )
    found = set() if changes is None else set(changes.banned_ids.tolist())
    assert found == {word[-1] for word in words if plain.ends_with(output, word[:-1])}


@torch_only
def test_a_long_bad_word_among_many_takes_no_more_than_itself() -> None:
    """A table as wide as the longest and as high as their number would be 2 MB for each request."""
    tracemalloc.start()
    try:
        long = RequestChanges(SamplingParams(bad_words_token_ids=[[5] * 1024]), EOS, 50)
        mixed = RequestChanges(SamplingParams(bad_words_token_ids=[[5] * 1024] + [[6]] * 255), EOS, 50)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert long.row(np.full(1030, 5, dtype=np.int32), 1) is not None
    assert mixed.row(np.array([5], dtype=np.int32), 1) is not None
    assert size < 256 * 1024


# counting -----------------------------------------------------------------------------------------------------------


@torch_only
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_counts_follow_tokens_that_come_and_go(data: st.DataObject) -> None:
    params = SamplingParams(
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.5])),
        frequency_penalty=data.draw(st.sampled_from([0.5, 0.0])),
    )
    if not RequestChanges.used_by(params):
        return
    changes = RequestChanges(params, EOS, 10)
    prompt = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    output: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()) or not output:
            output = output + data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))
        else:
            # A rollback; the step samples before another token can come.
            output = output[: data.draw(st.integers(0, len(output) - 1))]
        row = changes.row(np.array(prompt + output, dtype=np.int32), len(prompt))
        distinct = sorted({*output, *(prompt if params.repetition_penalty != 1.0 else [])})
        if not distinct:
            assert row is None
            continue
        assert row is not None
        assert row.penalties is not None
        assert row.penalties.ids.tolist() == distinct
        assert row.penalties.counts.tolist() == [output.count(token_id) for token_id in distinct]


# logprobs -----------------------------------------------------------------------------------------------------------


def logprobs_of(logits: torch.Tensor, **params: Any) -> SamplerOutput:
    each = SamplingParams(**{"seed": 3, "temperature": 1.0, **params})
    count, vocab_size = logits.shape
    return Sampler()(logits.clone(), metadata_of([each] * count, [([1], [2])] * count, vocab_size))


@pytest.mark.parametrize("vocab_size", [7, 1100, 50_000])
def test_the_whole_vocabulary_sums_to_one_is_sorted_and_has_the_sampled_token_first(vocab_size: int) -> None:
    logits = random_logits(2, vocab_size)
    logits[1, : vocab_size // 2] = logits[1, 0]  # ties
    output = logprobs_of(logits, logprobs=-1, repetition_penalty=1.5, top_k=5)
    for row, found in output.logprobs.items():
        listed = found.logprobs[1:]
        assert sorted(found.token_ids[1:]) == list(range(vocab_size))
        assert math.fsum(math.exp(logprob) for logprob in listed) == pytest.approx(1.0, abs=1e-3)
        assert listed == sorted(listed, reverse=True)
        assert found.token_ids[0] == output.token_ids[row]
        assert found.token_ids[found.sampled_rank] == found.token_ids[0]
        assert found.logprobs[found.sampled_rank] == found.logprobs[0]
        ordered = [(-logits[row, token_id].item(), token_id) for token_id in found.token_ids[1:]]
        assert ordered == sorted(ordered)


def test_named_tokens_come_with_their_ranks_in_the_whole_vocabulary() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, -math.inf, 2.0, 3.0]])
    found = logprobs_of(logits, temperature=0.0, logprob_token_ids=[2, 5, 3, 1, 2]).logprobs[0]
    assert (found.token_ids, found.sampled_rank) == ([1, 2, 5, 3, 1, 2], 1)
    assert found.ranks == [5, 2, 6, 1, 5]
    whole = logprobs_of(logits, temperature=0.0, logprobs=-1).logprobs[0]
    by_id = dict(zip(whole.token_ids, whole.logprobs, strict=True))
    assert found.logprobs == [by_id[token_id] for token_id in found.token_ids]


def test_no_named_tokens_leave_the_sampled_one() -> None:
    found = logprobs_of(random_logits(1, 9), logprob_token_ids=[]).logprobs[0]
    assert (len(found.token_ids), found.ranks) == (1, [])


def test_tokens_that_are_known_are_scored_as_if_they_had_been_sampled() -> None:
    logits = random_logits(3, 40)
    logits[1, 5] = math.nan
    token_ids = np.array([7, 5, 9])
    output = Sampler.score(logits, token_ids, np.array([2, 2, 40]))
    assert list(output.errors) == [1]
    for row in (0, 2):
        expected = plain.raw_logprobs(logits[row].tolist(), int(token_ids[row]), [2, 2, 40][row])
        assert expected is not None
        assert output.logprobs[row].token_ids == expected.token_ids
        assert output.logprobs[row].sampled_rank == expected.sampled_rank
        assert output.logprobs[row].logprobs == pytest.approx(expected.logprobs, abs=1e-5)


# memory -------------------------------------------------------------------------------------------------------------

DEMANDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "logprobs": 20},
    {"temperature": 1.0, "top_p": 0.9999, "logprobs": -1},
    {"temperature": 0.0, "logprob_token_ids": list(range(1000))},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 2.0, "presence_penalty": 1.0, "logprobs": 400},
    {"temperature": 1.0, "min_p": 0.5, "allowed_token_ids": list(range(900))},
]


@torch_only
@pytest.mark.parametrize("shape", [(2, 1500), (200, 1500), (1, 300_000), (5, 300_000)])
@pytest.mark.parametrize("flat", [True, False])
def test_no_batch_takes_more_memory_than_is_reserved(shape: tuple[int, int], flat: bool) -> None:
    """``flat`` logits are all ties, and the widest nuclei."""
    count, vocab_size = shape
    bias = {"temperature": 0.0, "logit_bias": dict.fromkeys(range(vocab_size), 1.0)}
    half = {"temperature": 0.0, "logprobs": vocab_size // 2}
    peaks = []
    for demand in [*DEMANDS, bias, half]:
        params = [SamplingParams(seed=1, **demand)] * count
        metadata = metadata_of(params, [(list(range(1500)), [5, 6])] * count, vocab_size)
        with PeakMemory() as watched:
            logits = torch.zeros(count, vocab_size) if flat else torch.randn(count, vocab_size)
            Sampler()(logits, metadata)
        peaks.append(watched.peak_bytes)
        del logits
    reserved = Sampler.workspace_bytes(count, vocab_size)
    assert max(peaks) <= reserved
    # Not reserved for nothing, either.
    assert reserved < 2.5 * max(peaks)
