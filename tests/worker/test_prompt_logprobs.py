"""Logprobs of prompts: of every token but the first, however it is computed, and never all logits at once."""

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.sample import Sampler
from octavo.types import ModelRunnerOutput
from octavo.worker import Worker
from octavo.worker.peak_memory import PeakMemory
from octavo.worker.prompt_logprobs import piece_rows
from tests.worker.toy import (
    POISON,
    VOCAB_SIZE,
    PlainRequest,
    PlainScheduler,
    ToyModel,
    params,
    reference_prompt_logprobs,
    reference_tokens,
    start,
    toy_config,
    toy_worker,
)

PROMPT = list(range(20, 40))


@pytest.fixture
def toy() -> tuple[Worker, ToyModel]:
    worker, model = toy_worker(toy_config())
    start(worker)
    model.logits_rows.clear()
    return worker, model


def check(request: PlainRequest) -> None:
    assert request.params.prompt_logprobs is not None
    expected = reference_prompt_logprobs(request.prompt, request.params.prompt_logprobs)
    assert list(request.prompt_logprobs) == list(range(1, len(request.prompt)))
    for position, found in request.prompt_logprobs.items():
        wanted = expected[position - 1]
        assert wanted is not None
        assert (found.token_ids, found.sampled_rank, found.ranks) == (wanted.token_ids, wanted.sampled_rank, [])
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


# what is computed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, VOCAB_SIZE, -1])
@pytest.mark.parametrize("chunks", [[20], [7, 12, 1], [19, 1], [1] * 20])
def test_each_token_of_the_prompt_but_the_first_has_its_logprobs_once(
    toy: tuple[Worker, ToyModel], num_logprobs: int, chunks: list[int]
) -> None:
    worker, model = toy
    scheduler = PlainScheduler()
    request = scheduler.add("a", PROMPT, params(prompt_logprobs=num_logprobs))
    outputs = [scheduler.step(worker, a=count) for count in chunks]
    check(request)
    parts = [output.prompt_logprobs["a"] for output in outputs if output.prompt_logprobs]
    starts = [1 + sum(chunks[:index]) for index in range(len(chunks))]
    assert [part.start for part in parts] == [start for start in starts if start < 20]
    # The last token of the prompt is followed by one that is sampled.
    assert sum(model.logits_rows) == 20
    scheduler.step(worker, a=1)
    assert request.outputs == reference_tokens(PROMPT, params(), 2)
    check(request)


def test_they_come_for_those_who_ask_beside_others_that_do_not(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    first = scheduler.add("first", PROMPT[:7], params(prompt_logprobs=2))
    plain = scheduler.add("plain", PROMPT[3:9], params(logprobs=1))
    second = scheduler.add("second", PROMPT[5:], params(prompt_logprobs=0, logprobs=3))
    one = scheduler.add("one", [30], params(prompt_logprobs=3))
    scheduler.step(worker, second=4, plain=3, first=7, one=1)
    output = scheduler.step(worker, first=1, one=1, second=11, plain=3)
    assert list(output.prompt_logprobs) == ["second"]
    for request in (first, second, one):
        check(request)
    assert plain.prompt_logprobs == {}
    for request in (first, plain, second, one):
        assert request.outputs == reference_tokens(request.prompt, request.params, len(request.outputs))


def test_after_a_preemption_the_prompt_is_told_again_and_the_output_is_no_prompt(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    scheduler.add("a", PROMPT, params(prompt_logprobs=1))
    for count in (20, 1, 1):
        scheduler.step(worker, a=count)
    scheduler.preempt("a")
    output = scheduler.step(worker, a=23)
    assert (output.prompt_logprobs["a"].start, len(output.prompt_logprobs["a"].entries)) == (1, 19)
    check(scheduler.requests["a"])


def test_a_broken_position_fails_its_request_alone(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    well = scheduler.add("well", PROMPT, params(prompt_logprobs=1))
    sick = scheduler.add("sick", [20, POISON, 21, 22], params(prompt_logprobs=1))
    silent = scheduler.add("silent", [20, POISON, 21, 22], params())
    output: ModelRunnerOutput = scheduler.step(worker, well=20, sick=4, silent=4)
    assert list(output.prompt_logprobs) == ["well"]
    assert sick.error is not None
    assert "NaN" in sick.error
    check(well)
    assert (well.error, silent.error) == (None, None)


# memory -------------------------------------------------------------------------------------------------------------


class WideModel(ToyModel):
    """Its logits are as wide as those of the largest vocabularies."""

    WIDTH = 250_000

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.logits_rows.append(len(hidden))
        ids = torch.arange(self.WIDTH, dtype=torch.float32)
        return (ids * (hidden[:, :1] % 1000 + 1).float()).sin_()


def test_a_long_prompt_never_needs_more_logits_at_once_than_a_piece() -> None:
    length = 250
    config = toy_config(WideModel.WIDTH, length + 1, max_num_batched_tokens=length)
    model = WideModel()
    worker = Worker(config, lambda *_: model)
    start(worker, max_model_len=length + 1)
    model.logits_rows.clear()
    scheduler = PlainScheduler()
    request = scheduler.add("a", [20 + index % 30 for index in range(length)], params(prompt_logprobs=2))
    with PeakMemory() as watched:
        scheduler.step(worker, a=length)
    piece = piece_rows(WideModel.WIDTH)
    assert piece == 67
    assert model.logits_rows == [1, 67, 67, 67, 48]
    assert list(request.prompt_logprobs) == list(range(1, length))
    # What is reserved for a piece; the logits of the whole prompt alone would be more.
    reserved, whole = Sampler.workspace_bytes(piece, WideModel.WIDTH), length * WideModel.WIDTH * 4
    assert watched.peak_bytes < reserved < 0.85 * whole


def test_memory_for_the_pieces_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens a step and few sequences: it is the logprobs of prompts that take most."""
    from octavo.platforms import current_platform

    monkeypatch.setattr(type(current_platform()), "available_memory_bytes", lambda self: 1 << 40)

    def step_bytes(**stated: object) -> int:
        worker, _ = toy_worker(toy_config(max_num_seqs=2, num_gpu_blocks_override=9, **stated))
        worker.init_device()
        worker.load_model()
        return (1 << 40) - worker.determine_available_memory()

    few, many = step_bytes(max_num_batched_tokens=8), step_bytes(max_num_batched_tokens=4096)
    assert many - few >= Sampler.workspace_bytes(4096, VOCAB_SIZE) - Sampler.workspace_bytes(8, VOCAB_SIZE)
    listed = step_bytes(max_num_batched_tokens=4096, max_logprobs=-1) - many
    assert listed == Sampler.listed_bytes(4096, VOCAB_SIZE) - Sampler.listed_bytes(4096, 20)
    # That is what lists of Python's take.
    entry = Sampler.score(torch.zeros(1, 5000), np.array([3]), np.array([5000])).logprobs[0]
    measured = 5001 * (8 + 8 + 24 + 32)
    assert len(entry.token_ids) == 5001
    assert measured <= Sampler.listed_bytes(1, 5000) < 1.3 * measured
