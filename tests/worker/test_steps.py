"""Steps through the worker: every token comes out as if its request were computed whole and alone."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import kernels
from octavo.types import SamplingParams
from octavo.worker import Worker
from tests.worker.toy import (
    EOS,
    MAX_MODEL_LEN,
    POISON,
    VOCAB_SIZE,
    PlainScheduler,
    ToyModel,
    params,
    reference_tokens,
    start,
    toy_config,
    toy_worker,
)

PROVIDERS = ["torch"] if find_spec("octavo._native") is None else ["torch", "native"]


@pytest.fixture(params=PROVIDERS, autouse=True, scope="module")
def provider(request: pytest.FixtureRequest) -> Iterator[str]:
    """A step's tensors are filled by numpy, and by one native call."""
    kernels.select(request.param)
    yield request.param
    kernels.select("torch")


@pytest.fixture
def toy() -> tuple[Worker, ToyModel]:
    worker, model = toy_worker(toy_config())
    start(worker)
    model.forwards.clear()
    model.logits_rows.clear()
    return worker, model


# what a step computes -----------------------------------------------------------------------------------------------


def test_a_prompt_in_chunks_samples_once_at_its_end(toy: tuple[Worker, ToyModel]) -> None:
    worker, model = toy
    scheduler = PlainScheduler()
    prompt = [20, 21, 22, 23, 24, 25, 26]
    request = scheduler.add("a", prompt, params())
    samples = [scheduler.step(worker, a=count).sampled_token_ids[0] for count in (3, 1, 3)]
    assert samples[:2] == [[], []]
    assert len(samples[2]) == 1
    assert model.forwards == [([20, 21, 22], [0, 1, 2]), ([23], [3]), ([24, 25, 26], [4, 5, 6])]
    assert model.logits_rows == [1]
    scheduler.step(worker, a=1)
    assert model.forwards[-1] == (samples[2], [7])
    assert request.outputs == reference_tokens(prompt, params(), 2)


def test_a_step_mixes_chunks_and_decodes_in_the_order_of_the_schedule(toy: tuple[Worker, ToyModel]) -> None:
    worker, model = toy
    scheduler = PlainScheduler()
    prompts = {"a": [30, 31, 32], "b": [33] * 9, "c": [34, 35]}
    for req_id, prompt in prompts.items():
        scheduler.add(req_id, prompt, params())
    scheduler.step(worker, a=3)
    output = scheduler.step(worker, c=2, a=1, b=5)
    assert output.req_ids == ["c", "a", "b"]
    assert [len(new) for new in output.sampled_token_ids] == [1, 1, 0]
    assert model.forwards[-1][1] == [0, 1, 3, 0, 1, 2, 3, 4]
    assert model.logits_rows == [1, 2]
    scheduler.step(worker, b=4, c=1)
    expected = {req_id: reference_tokens(prompt, params(), 2) for req_id, prompt in prompts.items()}
    assert scheduler.requests["a"].outputs == expected["a"]
    assert scheduler.requests["b"].outputs == expected["b"][:1]
    assert scheduler.requests["c"].outputs == expected["c"]


def test_a_cached_prefix_is_not_computed_again(toy: tuple[Worker, ToyModel]) -> None:
    worker, model = toy
    scheduler = PlainScheduler()
    prompt = list(range(20, 30))
    first = scheduler.add("a", prompt, params())
    scheduler.step(worker, a=10)
    second = scheduler.add("b", prompt, params())
    output = scheduler.schedule(b=2)
    request = output.scheduled_new_reqs[0]
    assert first.blocks is not None
    request.block_ids = tuple([*blocks[:2], 399 - group] for group, blocks in enumerate(first.blocks))
    request.num_computed_tokens = 8
    worker.execute_model(output)
    result = worker.sample_tokens()
    assert model.forwards[-1] == ([28, 29], [8, 9])
    assert result.sampled_token_ids == [reference_tokens(prompt, params(), 1)]
    assert second.prompt == prompt


def test_a_step_without_requests_computes_nothing(toy: tuple[Worker, ToyModel]) -> None:
    worker, model = toy
    output = PlainScheduler().step(worker)
    assert (output.req_ids, output.sampled_token_ids, output.logprobs, output.errors) == ([], [], [], {})
    assert model.forwards == []


def test_a_request_may_use_the_whole_model_length(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    prompt = [20 + i % 30 for i in range(MAX_MODEL_LEN - 2)]
    request = scheduler.add("a", prompt, params())
    scheduler.step(worker, a=len(prompt))
    scheduler.step(worker, a=1)
    assert request.outputs == reference_tokens(prompt, params(), 2)


# lives of requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [params(), params(seed=3, temperature=1.0, top_k=20, top_p=0.9)])
def test_preempted_and_resumed_equals_uninterrupted(toy: tuple[Worker, ToyModel], sampling: SamplingParams) -> None:
    worker, model = toy
    scheduler = PlainScheduler()
    prompt = [40, 41, 42, 43, 44]
    scheduler.add("a", prompt, sampling)
    scheduler.step(worker, a=5)
    for _ in range(3):
        scheduler.step(worker, a=1)
    scheduler.preempt("a")
    scheduler.step(worker, a=6)
    assert model.forwards[-1][1] == list(range(6))
    scheduler.step(worker, a=3)
    scheduler.step(worker, a=1)
    assert scheduler.requests["a"].outputs == reference_tokens(prompt, sampling, 6)


def test_an_id_may_be_used_again_in_the_step_that_says_it_finished(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    scheduler.add("a", [20] * 10, params(temperature=1.0, logprobs=2))
    scheduler.step(worker, a=10)
    scheduler.finish("a")
    second = scheduler.add("a", [21, 22], params())
    output = scheduler.schedule(a=2)
    assert output.finished_req_ids == ["a"]
    worker.execute_model(output)
    scheduler.receive(worker.sample_tokens())
    assert second.outputs == reference_tokens([21, 22], params(), 1)
    assert second.logprobs == []


def test_ids_that_are_used_again_name_the_new_requests_wherever_they_are(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    for round_index in range(3):  # each time, each is where the other was
        prompts = {req_id: [20 + 3 * round_index + place] * 3 for place, req_id in enumerate("ab")}
        requests = [scheduler.add(req_id, prompts[req_id], params()) for req_id in "ab"]
        scheduler.step(worker, a=3, b=3)
        scheduler.step(worker, a=1, b=1)
        for request, prompt in zip(requests, prompts.values(), strict=True):
            assert request.outputs == reference_tokens(prompt, params(), 2)
        for req_id in "ab":
            scheduler.finish(req_id)


def test_finished_requests_that_never_reached_the_worker_are_no_error(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    output = PlainScheduler().schedule()
    output.finished_req_ids.append("unknown")
    worker.execute_model(output)
    assert worker.sample_tokens().req_ids == []


def test_fewer_outputs_than_the_worker_holds_are_a_rollback(toy: tuple[Worker, ToyModel]) -> None:
    worker, model = toy
    scheduler = PlainScheduler()
    sampling = params(seed=9, temperature=1.0)
    request = scheduler.add("a", [45, 46, 47], sampling)
    for count in (3, 1, 1, 1):
        scheduler.step(worker, a=count)
    expected = reference_tokens([45, 46, 47], sampling, 4)
    assert request.outputs == expected
    request.outputs, request.computed = expected[:2], 4
    scheduler.step(worker, a=1)
    assert model.forwards[-1] == ([expected[1]], [4])
    scheduler.step(worker, a=1)
    assert request.outputs == expected


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_life_among_any_neighbours_gives_the_tokens_of_the_request_alone(data: st.DataObject) -> None:
    worker, _ = toy_worker(toy_config(max_num_seqs=4))
    start(worker)
    scheduler = PlainScheduler(seed=data.draw(st.integers(0, 99)))
    ended = []
    for number in range(data.draw(st.integers(5, 25))):
        held = list(scheduler.requests)
        if len(held) < 4 and data.draw(st.booleans()):
            prompt = data.draw(st.lists(st.integers(14, VOCAB_SIZE - 1), min_size=1, max_size=12))
            scheduler.add(f"r{number}", prompt, data.draw(sampling_params()), number % 3)
        for req_id in held:
            event = data.draw(st.sampled_from(["go on"] * 6 + ["finish", "preempt"]))
            request = scheduler.requests[req_id]
            if event == "finish":
                ended.append(scheduler.finish(req_id))
            elif event == "preempt" and request.blocks is not None:
                scheduler.preempt(req_id)
        order = data.draw(st.permutations(list(scheduler.requests)))
        due = {req_id: scheduler.requests[req_id].num_tokens - scheduler.requests[req_id].computed for req_id in order}
        scheduler.step(worker, **{r: data.draw(st.integers(1, n)) for r, n in due.items() if data.draw(st.booleans())})
    for request in [*ended, *scheduler.requests.values()]:
        expected = reference_tokens(request.prompt, request.params, len(request.outputs), request.choice_index)
        assert request.outputs == expected


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        params,
        seed=st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1),  # -1 is None
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_k=st.sampled_from([0, 5]),
        top_p=st.sampled_from([1.0, 0.8]),
        min_tokens=st.sampled_from([0, 0, 3]),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
        logprobs=st.sampled_from([None, 0, 4]),
    )


def test_control_a_wrong_block_table_changes_the_tokens(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    request = scheduler.add("a", [20, 21, 22, 23, 24, 25], params())
    output = scheduler.schedule(a=6)
    blocks = output.scheduled_new_reqs[0].block_ids[0]
    blocks[1] = blocks[0]
    worker.execute_model(output)
    scheduler.receive(worker.sample_tokens())
    assert request.outputs != reference_tokens(request.prompt, params(), 1)


# sampling -----------------------------------------------------------------------------------------------------------


def test_min_tokens_keeps_the_ending_ids_out_until_it_is_reached(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    everything = [i for i in range(VOCAB_SIZE) if i not in (30, POISON)]
    sampling = params(min_tokens=3, stop_token_ids=everything, logprobs=VOCAB_SIZE, temperature=1.0)
    request = scheduler.add("a", [20, 21], sampling)
    scheduler.add("b", [20, 21], params(seed=1))
    scheduler.step(worker, a=2, b=2)
    for _ in range(4):
        scheduler.step(worker, a=1, b=1)
    assert request.outputs[:3] == [30, 30, 30]
    assert request.outputs == reference_tokens([20, 21], sampling, 5)
    assert request.outputs[3] != 30
    # The logprobs are raw: 30 is not the only token that was possible.
    assert request.logprobs[0].logprobs[0] < -0.1
    assert scheduler.requests["b"].outputs == reference_tokens([20, 21], params(), 5)


def test_an_end_of_sequence_beyond_the_vocabulary_does_no_harm(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    request = scheduler.add("a", [20], params(min_tokens=2))
    output = scheduler.schedule(a=1)
    output.scheduled_new_reqs[0].eos_token_ids = [EOS, VOCAB_SIZE + 100]
    worker.execute_model(output)
    scheduler.receive(worker.sample_tokens())
    assert request.outputs == reference_tokens([20], params(min_tokens=2), 1)


def test_logprobs_come_with_each_sampled_token_of_those_who_asked(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    asked = scheduler.add("a", [20, 21, 22], params(logprobs=3))
    scheduler.add("b", [23], params())
    first = scheduler.step(worker, b=1, a=2)
    assert first.logprobs == [None, None]
    second = scheduler.step(worker, b=1, a=1)
    assert second.logprobs[0] is None
    assert second.logprobs[1] is not None
    assert asked.logprobs[0].token_ids[:2] == [asked.outputs[0]] * 2
    assert asked.logprobs[0].sampled_rank == 1
    assert len(asked.logprobs[0].token_ids) == len(asked.logprobs[0].logprobs) == 4


def test_nan_logits_fail_one_request_and_no_other(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    sick = scheduler.add("sick", [20, POISON], params(logprobs=1))
    well = scheduler.add("well", [21, 22], params())
    scheduler.step(worker, sick=2, well=2)
    assert sick.outputs == []
    assert sick.error is not None
    assert "NaN" in sick.error
    assert well.error is None
    scheduler.finish("sick")
    scheduler.step(worker, well=1)
    assert well.outputs == reference_tokens([21, 22], params(), 2)


def test_a_step_scheduled_before_its_request_failed_samples_nothing(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    sick = scheduler.add("sick", [20, POISON], params())
    steps = [scheduler.schedule(sick=2), scheduler.schedule(sick=1)]  # the second counts on the first one's token
    for step in steps:
        worker.execute_model(step)
        scheduler.receive(worker.sample_tokens())
    assert sick.outputs == []
    assert sick.error is not None


# order of calls -----------------------------------------------------------------------------------------------------


def test_a_second_forward_before_sampling_is_refused(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    scheduler = PlainScheduler()
    scheduler.add("a", [20], params())
    worker.execute_model(scheduler.schedule(a=1))
    with pytest.raises(RuntimeError, match="twice"):
        worker.execute_model(PlainScheduler().schedule())
    assert worker.sample_tokens().sampled_token_ids == [reference_tokens([20], params(), 1)]


def test_sampling_without_a_forward_is_refused(toy: tuple[Worker, ToyModel]) -> None:
    with pytest.raises(RuntimeError, match="without a forward"):
        toy[0].sample_tokens()


def test_a_failed_forward_leaves_nothing_to_sample_and_the_next_step_works(
    toy: tuple[Worker, ToyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, model = toy
    scheduler = PlainScheduler()
    request = scheduler.add("a", [20, 21], params())

    def fail(*args: Any) -> torch.Tensor:
        raise MemoryError("made up")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail)
        with pytest.raises(MemoryError):
            worker.execute_model(scheduler.schedule(a=2))
        with pytest.raises(RuntimeError, match="without a forward"):
            worker.sample_tokens()
    scheduler.finish("a")
    scheduler.flying.clear()
    again = scheduler.add("a", [20, 21], params())
    scheduler.step(worker, a=2)
    assert again.outputs == reference_tokens([20, 21], params(), 1)
    assert request.outputs == []


def test_a_request_that_comes_as_new_twice_is_refused(toy: tuple[Worker, ToyModel]) -> None:
    worker, _ = toy
    for attempt in range(2):
        scheduler = PlainScheduler()
        scheduler.add("a", [20], params())
        if attempt == 0:
            scheduler.step(worker, a=1)
        else:
            with pytest.raises(ValueError, match="holds it already"):
                worker.execute_model(scheduler.schedule(a=1))
