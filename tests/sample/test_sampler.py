"""The sampler against a plain reference, row by row; and each row independent of all others, bit for bit."""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.sample import RowChanges, Sampler, SamplerOutput, SamplingMetadata
from octavo.types import NO_TOKEN_LEFT, SamplingParams
from tests.sample import plain

pytestmark = pytest.mark.usefixtures("provider")
torch_only = pytest.mark.parametrize("provider", ["torch"], indirect=True)

INF = math.inf
NAN = math.nan
# Where each chunk of the work, and the first look of top-p, ends; the tests go beyond both.
CHUNK_LOGITS = 1 << 20
FIRST_CANDIDATES = 1024


@dataclass
class Row:
    """What one request asks, as plain values."""

    temperature: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    choice_index: int = 0
    output_position: int = 0
    num_logprobs: int = -1
    banned: tuple[int, ...] = ()


def metadata_of(rows: list[Row], changes: dict[int, RowChanges] | None = None) -> SamplingMetadata:
    def column(name: str) -> np.ndarray:
        kind = np.float64 if name in ("temperature", "min_p", "top_p") else np.int64
        return np.array([getattr(row, name) for row in rows], dtype=kind)

    return SamplingMetadata(
        **{item.name: column(item.name) for item in fields(Row) if item.name != "banned"},
        changes=changes
        or {i: RowChanges(banned_ids=np.array(row.banned, dtype=np.int64)) for i, row in enumerate(rows) if row.banned},
    )


def sample(logits: list[list[float]] | torch.Tensor, rows: list[Row]) -> SamplerOutput:
    return Sampler()(torch.as_tensor(logits, dtype=torch.float32).clone(), metadata_of(rows))


def tokens(logits: list[list[float]] | torch.Tensor, *rows: Row) -> list[int]:
    return sample(logits, list(rows)).token_ids.tolist()


def reference(logits: list[float], row: Row) -> int:
    """What a row must give, in plain Python."""
    allowed = [-INF if token_id in row.banned else logit for token_id, logit in enumerate(logits)]
    params = SamplingParams(temperature=row.temperature, min_p=row.min_p, top_k=row.top_k, top_p=row.top_p)
    params.seed = row.seed
    return plain.next_token(allowed, params, row.choice_index, row.output_position)


def random_logits(rows: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * spread


# greedy -------------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_most_likely_token() -> None:
    assert tokens([[0.0, 3.0, 1.0], [2.0, -1.0, 0.5]], Row(), Row()) == [1, 0]


@pytest.mark.parametrize("vocab_size", [3, 40, 1000, 70_000])
def test_greedy_ties_go_to_the_lower_id(vocab_size: int) -> None:
    logits = torch.zeros(4, vocab_size)
    logits[1, 1:] = 5.0
    logits[2, [vocab_size - 2, vocab_size - 1]] = 5.0
    logits[3, :] = -1e30
    assert tokens(logits, *[Row()] * 4) == [0, 1, vocab_size - 2, 0]
    assert tokens(logits[2:3], Row()) == [vocab_size - 2]


# against the reference ----------------------------------------------------------------------------------------------

# Few different values, so that ties are everywhere; and some that overflow what is careless.
tied_logits = st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, -3.0, -INF])
wild_logits = st.sampled_from([INF, -INF, 1e30, -1e30, 3.4e38, 88.0, 0.0, -0.0, 1e-30])
plain_logits = st.floats(-20, 20, width=32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[Row]]:
    vocab_size = draw(st.integers(1, 24))
    kind = draw(st.sampled_from([tied_logits, plain_logits, wild_logits]))
    logits, rows = [], []
    for _ in range(draw(st.integers(1, 6))):
        values = draw(st.lists(kind, min_size=vocab_size, max_size=vocab_size))
        row = Row(
            temperature=draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.03, 0.3, 1.0])),
            top_k=draw(st.sampled_from([0, 1, 2, 5, vocab_size, vocab_size + 9])),
            top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-9])),
            seed=draw(st.integers(-(2**63), 2**63 - 1)),
            choice_index=draw(st.integers(0, 3)),
            output_position=draw(st.integers(0, 1000)),
            banned=tuple(draw(st.sets(st.integers(0, vocab_size - 1), max_size=3))),
        )
        if any(value > -INF for token_id, value in enumerate(values) if token_id not in row.banned):
            logits.append(values)
            rows.append(row)
    return logits, rows


@settings(max_examples=300, deadline=None)
@given(batches())
@example(([[0.0, 1e-30]], [Row(temperature=0.01, min_p=1.0)]))  # both weigh 1.0
def test_every_row_is_what_the_plain_reference_gives(batch: tuple[list[list[float]], list[Row]]) -> None:
    logits, rows = batch
    if rows:
        assert tokens(logits, *rows) == [reference(values, row) for values, row in zip(logits, rows, strict=True)]


@pytest.mark.parametrize("top_k", [0, 3, 1500, 2999])
@pytest.mark.parametrize("top_p", [1.0, 0.2, 0.99])
def test_wide_nuclei_are_found_beyond_the_first_look(top_k: int, top_p: float) -> None:
    vocab_size = 3000
    logits = random_logits(3, vocab_size, spread=0.3)
    rows = [Row(temperature=1.3, top_k=top_k, top_p=top_p, seed=seed) for seed in range(3)]
    assert tokens(logits, *rows) == [reference(logits[i].tolist(), rows[i]) for i in range(3)]
    flat = torch.zeros(1, vocab_size)
    assert tokens(flat, rows[0]) == [reference(flat[0].tolist(), rows[0])]


def drawn_ids(logits: list[float], row: Row, count: int = 400) -> set[int]:
    rows = [Row(**{**vars(row), "output_position": position}) for position in range(count)]
    return set(tokens([logits] * count, *rows))


def test_top_k_keeps_exactly_k_tokens_lower_ids_first_among_ties() -> None:
    logits = [1.0, 2.0, 1.0, 1.0, 2.0, 1.0]
    assert drawn_ids(logits, Row(temperature=1.0, top_k=1)) == {1}
    assert drawn_ids(logits, Row(temperature=1.0, top_k=4)) == {0, 1, 2, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_p_lower_ids_first_among_ties() -> None:
    even = [0.0] * 4
    assert drawn_ids(even, Row(temperature=1.0, top_p=0.5)) == {0, 1}
    assert drawn_ids(even, Row(temperature=1.0, top_p=0.51)) == {0, 1, 2}
    assert drawn_ids(even, Row(temperature=1.0, top_p=1e-9)) == {0}


def test_top_p_acts_on_what_top_k_left_and_after_temperature() -> None:
    logits = [math.log(weight) for weight in (4.0, 2.0, 1.0, 1.0)]
    assert drawn_ids(logits, Row(temperature=1.0, top_p=0.6)) == {0, 1}
    assert drawn_ids(logits, Row(temperature=1.0, top_p=0.6, top_k=2)) == {0}
    assert drawn_ids(logits, Row(temperature=0.5, top_p=0.6)) == {0}


def test_a_filter_that_keeps_everything_changes_nothing() -> None:
    logits = random_logits(1, 50).expand(64, 50)
    plain = [Row(temperature=1.0, seed=seed) for seed in range(64)]
    kept = [Row(temperature=1.0, seed=seed, top_k=50 + seed % 2) for seed in range(64)]
    assert tokens(logits, *plain) == tokens(logits, *kept)


@torch_only
@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_the_unit_interval_do_not_draw_impossible_tokens(
    monkeypatch: pytest.MonkeyPatch, uniform: float, expected: int
) -> None:
    monkeypatch.setattr("octavo.sample.definition.uniforms", lambda *key: np.array([uniform]))
    assert tokens([[-INF, 0.3, -INF, 0.1, -INF]], Row(temperature=0.7)) == [expected]


# independence -------------------------------------------------------------------------------------------------------


def some_rows(count: int, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        Row(
            temperature=float(rng.choice([0.0, 0.3, 1.0])),
            top_k=int(rng.choice([0, 0, 4, 40, 2000])),
            top_p=float(rng.choice([1.0, 1.0, 0.9, 0.4])),
            seed=int(rng.integers(-(2**62), 2**62)),
            output_position=int(rng.integers(100)),
            num_logprobs=int(rng.choice([-1, 0, 3, 20])),
            min_p=float(rng.choice([0.0, 0.0, 0.05])),
            banned=(int(rng.integers(33)),) if rng.random() < 0.3 else (),
        )
        for _ in range(count)
    ]


@settings(max_examples=40, deadline=None)
@given(vocab_size=st.sampled_from([33, 1100, 5003]), count=st.integers(2, 20), seed=st.integers(0, 10_000))
def test_a_row_alone_is_the_row_in_a_crowd_bit_for_bit(vocab_size: int, count: int, seed: int) -> None:
    logits, rows = random_logits(count, vocab_size, seed), some_rows(count, seed)
    together = sample(logits, rows)
    order = np.random.default_rng(seed).permutation(count).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order])
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], [row])
        assert alone.token_ids[0] == together.token_ids[i] == shuffled.token_ids[order.index(i)]
        assert alone.logprobs.get(0) == together.logprobs.get(i) == shuffled.logprobs.get(order.index(i))


def test_rows_in_different_chunks_of_a_large_batch_are_the_rows_alone() -> None:
    vocab_size, count = 70_001, 20
    assert vocab_size * count > CHUNK_LOGITS
    logits, rows = random_logits(count, vocab_size, spread=6.0), some_rows(count, 5)
    together = sample(logits, rows)
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], [row])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs.get(0) == together.logprobs.get(i)


# logprobs -----------------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_distribution_sampled_token_first() -> None:
    logits = random_logits(1, 40)
    row = Row(temperature=0.4, top_k=3, seed=5, num_logprobs=6)
    output = sample(logits, [row])
    expected = logits[0].double().log_softmax(dim=-1)
    descending = sorted(range(40), key=lambda token_id: (-float(logits[0, token_id]), token_id))
    found = output.logprobs[0]
    sampled = int(output.token_ids[0])
    assert found.token_ids == [sampled, *descending[:6]]
    assert found.logprobs == pytest.approx(expected[found.token_ids].tolist(), abs=1e-6)
    assert found.sampled_rank == descending.index(sampled) + 1


def test_logprobs_come_for_the_rows_that_ask_each_as_many_as_it_asks() -> None:
    rows = [Row(), Row(num_logprobs=0), Row(num_logprobs=2), Row(num_logprobs=99)]
    output = sample(random_logits(4, 10), rows)
    assert {row: len(found.token_ids) for row, found in output.logprobs.items()} == {1: 1, 2: 3, 3: 11}


def test_equal_logprobs_are_listed_lower_id_first_and_ranked_so() -> None:
    found = sample([[1.0, 2.0, 1.0, 2.0, 1.0]], [Row(num_logprobs=4, banned=(0, 1, 2, 3))]).logprobs[0]
    assert found.token_ids == [4, 1, 3, 0, 2]
    assert found.sampled_rank == 5


def test_the_probabilities_of_the_whole_vocabulary_sum_to_one() -> None:
    found = sample(random_logits(1, 300), [Row(num_logprobs=300)]).logprobs[0]
    assert sum(math.exp(logprob) for logprob in found.logprobs[1:]) == pytest.approx(1.0, abs=1e-5)
    assert found.logprobs[1:] == sorted(found.logprobs[1:], reverse=True)


def test_banned_tokens_are_never_sampled_and_keep_their_raw_logprobs() -> None:
    logits = [[5.0, 1.0, 0.0]]
    row = Row(temperature=1.0, banned=(0, 2), num_logprobs=3)
    free = sample(logits, [Row(num_logprobs=3)]).logprobs[0]
    found = sample(logits, [row]).logprobs[0]
    assert found.token_ids == [1, 0, 1, 2]
    assert found.logprobs[1:] == free.logprobs[1:]
    assert found.sampled_rank == 2


# extreme and broken logits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
def test_extreme_logits_are_sampled_from(temperature: float) -> None:
    rows = [Row(temperature=temperature, num_logprobs=2, seed=seed) for seed in range(4)]
    logits = [[1e30, -1e30, 0.0], [-INF, 3.4e38, -INF], [INF, 0.0, -INF], [-INF, -INF, -1e30]]
    output = sample(logits, rows)
    assert output.token_ids.tolist() == [0, 1, 0, 2]
    assert output.errors == {}
    assert [output.logprobs[row].logprobs[0] for row in range(4)] == [0.0] * 4


def test_several_infinite_logits_share_the_probability() -> None:
    logits = [0.0, INF, 5.0, INF]
    assert drawn_ids(logits, Row(temperature=1.0)) == {1, 3}
    found = sample([logits], [Row(num_logprobs=3)]).logprobs[0]
    assert found.token_ids == [1, 1, 3, 2]
    assert found.logprobs == pytest.approx([math.log(0.5)] * 3 + [-INF])


@pytest.mark.parametrize("broken", [[NAN, 1.0, 2.0], [NAN, NAN, NAN], [INF, NAN, -INF], [-INF, -INF, -INF]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_fails_alone(broken: list[float], temperature: float) -> None:
    row = Row(temperature=temperature, top_k=2, top_p=0.5, num_logprobs=2)
    logits = [[1.0, 2.0, 3.0], broken, [3.0, 2.0, 1.0]]
    output = sample(logits, [row] * 3)
    whole = sample([logits[0], logits[2]], [row] * 2)
    assert list(output.errors) == [1]
    assert "logits" in output.errors[1]
    assert output.token_ids.tolist() == [whole.token_ids[0], -1, whole.token_ids[1]]
    assert [output.logprobs[0], output.logprobs[2]] == [whole.logprobs[0], whole.logprobs[1]]
    assert 1 not in output.logprobs


@pytest.mark.parametrize("num_logprobs", [-1, 1])
@pytest.mark.parametrize("vocab_size", [2, 100])
def test_nan_behind_a_banned_token_is_an_error_all_the_same(num_logprobs: int, vocab_size: int) -> None:
    logits = random_logits(2, vocab_size)
    logits[0, 1] = NAN
    output = sample(logits, [Row(banned=(1,), num_logprobs=num_logprobs)] * 2)
    assert list(output.errors) == [0]
    assert "NaN" in output.errors[0]
    logits[1, 1] = -INF
    assert output.token_ids.tolist() == [-1, int(logits[1].argmax())]


def test_banning_every_token_that_is_possible_fails_the_row() -> None:
    output = sample([[1.0, -INF], [-INF, -INF]], [Row(banned=(0,)), Row()])
    assert output.errors[0] == NO_TOKEN_LEFT
    assert "the model computed logits of -inf" in output.errors[1]  # control: no doing of the request's


# what is not used costs nothing -------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records every torch op and the shape of its first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shape = tuple(args[0].shape) if args and isinstance(args[0], torch.Tensor) else ()
        self.calls.append((func.overloadpacket.__name__, shape))
        return func(*args, **(kwargs or {}))


def ops(rows: list[Row]) -> list[tuple[str, tuple[int, ...]]]:
    logits, metadata = random_logits(len(rows), 100), metadata_of(rows)
    with Recorder() as recorder:
        Sampler()(logits, metadata)
    return [(name, shape) for name, shape in recorder.calls if len(shape) == 2 and shape[1] == 100]


@torch_only
def test_an_all_greedy_batch_computes_an_argmax_and_nothing_else() -> None:
    assert [name for name, _ in ops([Row()] * 5)] == ["argmax", "gather"]


@torch_only
def test_filters_touch_only_the_rows_that_use_them() -> None:
    plain = Row(temperature=1.0)
    without = {name for name, _ in ops([plain, Row(), plain])}
    assert not without & {"topk", "sort"}
    shapes = [shape for name, shape in ops([plain, Row(temperature=1.0, top_k=3), Row(), plain]) if name == "topk"]
    assert shapes == [(1, 100)]
    assert {shape[0] for name, shape in ops([plain, Row(), plain]) if name == "exp_"} == {2}
