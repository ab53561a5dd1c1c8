"""Step replay: a recorded forward gives the bits of the forward itself for any number of rows; what cannot be replayed
is refused, and says why."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo import kernels
from octavo.errors import UnsupportedError

pytestmark = pytest.mark.skipif(find_spec("octavo._native") is None, reason="built without native kernels")

MAX_ROWS = 40
WIDTH = 48
DEPENDS = "number of tokens|is not what it computes for 40"
Forward = Callable[[Tensor], Tensor]
few = settings(max_examples=15, deadline=None, derandomize=True)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", autouse=True)
def native() -> Iterator[None]:
    kernels.select("native")
    yield
    kernels.select("torch")


@pytest.fixture(scope="module")
def weights(native: None) -> list[kernels.Weight]:
    return [kernels.pack_weight(random(WIDTH, WIDTH, seed=seed)) for seed in range(4)]


def record(forward: Forward, rows_of_input: Tensor) -> kernels.RecordedForward:
    return kernels.record_forward(lambda rows: forward(rows_of_input[:rows]), (rows_of_input,), MAX_ROWS)


@pytest.fixture
def x() -> Tensor:
    return random(MAX_ROWS, WIDTH, seed=9)


def in_chain(weights: list[kernels.Weight], between: Forward = lambda x: x) -> Forward:
    """Layers of which each needs the memory of the ones before."""

    def forward(x: Tensor) -> Tensor:
        for index, weight in enumerate(weights):
            x = kernels.rms_norm(kernels.linear(x, weight), NORM, 1e-5)
            if index == 1:
                x = between(x)
        return x

    return forward


NORM = random(WIDTH, seed=5)


@few
@given(rows=st.integers(0, MAX_ROWS))
def test_replayed_is_eager_for_any_number_of_rows(weights: list[kernels.Weight], rows: int) -> None:
    forward, x = in_chain(weights), random(MAX_ROWS, WIDTH, seed=9)
    recorded = record(forward, x)
    assert (recorded.mode, recorded.split_by) == ("FULL", [])
    x.copy_(random(MAX_ROWS, WIDTH, seed=rows))  # other inputs in the same buffers
    assert torch.equal(recorded.run(rows, 1), forward(x[:rows]))


@pytest.mark.parametrize(
    ("between", "name"),
    [
        (lambda x: x.sin(), "aten.sin"),
        (lambda x: x.mul_(0.5), "aten.mul_"),
        (lambda x: (x + x.flip(-1)).contiguous(), "aten.flip"),
        (lambda x: x * NORM, "aten.mul"),
        (lambda x: torch.cat(x.split(16, dim=-1)[::-1], dim=-1), "aten.cat"),
    ],
    ids=["one op", "in place", "several", "with a constant", "of a list"],
)
def test_an_op_of_torchs_is_run_again_between_the_kernels(
    weights: list[kernels.Weight], x: Tensor, between: Forward, name: str
) -> None:
    forward = in_chain(weights, between)
    recorded = record(forward, x)
    assert recorded.mode == "PIECEWISE"
    assert any(name in op for op in recorded.split_by)
    for rows in (1, 7, MAX_ROWS):
        x.copy_(random(MAX_ROWS, WIDTH, seed=rows))
        assert torch.equal(recorded.run(rows, 1).clone(), forward(x[:rows]))


def test_control_kernels_alone_would_lose_torchs_op(weights: list[kernels.Weight], x: Tensor) -> None:
    recorded, without = record(in_chain(weights, lambda x: x.sin()), x), record(in_chain(weights), x)
    assert not torch.equal(recorded.run(5, 1).clone(), without.run(5, 1))


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (lambda x: x * x.shape[0], DEPENDS),
        (lambda x: x if x.shape[0] > 20 else x.sin(), DEPENDS),
        (
            lambda x: x if x.shape[0] > 1 else kernels.rms_norm(x, NORM, 1e-5),
            DEPENDS,
        ),
        (lambda x: kernels.rms_norm(x, NORM, 1e-5 * x.shape[0]), DEPENDS),
        (lambda x: kernels.linear(x[:7], kernels.pack_weight(torch.ones(48, 48))), "shape"),
        (lambda x: kernels.rms_norm(x[:7], NORM, 1e-5), "shape"),
        (lambda x: x + x.sum(), "shape"),
        (lambda x: x if x.sum().item() > 0 else -x, "shape|value"),
        (lambda x: x[:, : int(x[0, 0]) + 2], "value"),
        (lambda x: x.new_ones(x.shape) + x, "is not what it computes"),
    ],
)
def test_what_depends_on_the_number_of_rows_or_on_values_is_refused(
    weights: list[kernels.Weight], x: Tensor, between: Forward, why: str
) -> None:
    with pytest.raises(UnsupportedError, match=why):
        record(in_chain(weights, between), x)
    # The next one is not harmed.
    assert kernels.rms_norm(x, NORM, 1e-5).any()
    assert record(in_chain(weights), x).mode == "FULL"


def test_nothing_is_computed_while_it_is_recorded(weights: list[kernels.Weight], x: Tensor) -> None:
    calls: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(kernels.rms_norm(x, NORM, 1e-5))
        return calls[-1]

    recorded = record(forward, x)
    assert not calls[0].any()
    recorded.run(MAX_ROWS, 1)
    assert calls[0].any()


def test_memory_is_used_again_within_a_forward(weights: list[kernels.Weight], x: Tensor) -> None:
    places: set[int] = set()

    def forward(x: Tensor) -> Tensor:
        for _ in range(30):
            x = kernels.linear(x, weights[0])
            places.add(x.data_ptr())
        return x

    recorded = record(forward, x)
    assert len(places) == 2  # one is read while the other is written
    assert torch.equal(recorded.run(3, 1), forward(x[:3]))


def test_definitions_cannot_be_recorded(x: Tensor) -> None:
    kernels.select("torch")
    with pytest.raises(UnsupportedError, match="torch kernels cannot be recorded"):
        record(lambda x: x, x)
    kernels.select("native")
