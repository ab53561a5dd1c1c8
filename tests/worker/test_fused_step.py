"""Steps in one native call give what steps in two calls give, and harm nobody."""

from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from octavo.types import CachedRequestData, ModelRunnerOutput, SamplingParams, SchedulerOutput
from octavo.worker import Worker
from octavo.worker.fused_step import FusedStep
from octavo.worker.input_batch import InputBatch
from octavo.worker.step_inputs import StepInputs
from tests.worker.test_llama import NUM_TOKENS, PROMPTS, generate, llama_worker, new_request

pytestmark = pytest.mark.skipif(find_spec("octavo._native") is None, reason="built without native kernels")

PLAIN = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=0)
SAMPLED = SamplingParams(temperature=1.2, max_tokens=NUM_TOKENS, seed=7)


@pytest.fixture
def worker(tiny_llama_dir: Path) -> Worker:
    return llama_worker(tiny_llama_dir)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutput]:
    """The steps that were taken in one call."""
    run = FusedStep.run
    steps: list[SchedulerOutput] = []

    def counted(self: FusedStep, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        steps.append(scheduler_output)
        return run(self, scheduler_output)

    monkeypatch.setattr(FusedStep, "run", counted)
    return steps


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        SAMPLED,
        msgspec.structs.replace(SAMPLED, top_k=40, top_p=0.9),
        msgspec.structs.replace(SAMPLED, min_p=0.01),
    ],
    ids=["greedy", "sampled", "top-k and top-p", "min-p"],
)
def test_tokens_are_those_of_steps_that_are_not_fused(
    worker: Worker, fused: list[SchedulerOutput], sampling: SamplingParams
) -> None:
    in_one = generate(worker, sampling)
    assert any(len(step.num_scheduled_tokens) == 3 for step in fused)
    worker.execute_model(SchedulerOutput(0, [], CachedRequestData.empty(), {}, 0, list(PROMPTS), []))
    worker.sample_tokens()
    fused.clear()
    in_two = generate(worker, msgspec.structs.replace(sampling, logprobs=0))
    assert not fused
    assert {req_id: tokens for req_id, (tokens, _) in in_one.items()} == {
        req_id: tokens for req_id, (tokens, _) in in_two.items()
    }


def test_chunks_of_a_prompt_may_be_beside_requests_that_sample(worker: Worker, fused: list[SchedulerOutput]) -> None:
    new = [new_request("a", 1, PLAIN), new_request("b", 5, PLAIN)]
    worker.execute_model(SchedulerOutput(1, new, CachedRequestData.empty(), {"a": 16, "b": 1}, 17, [], []))
    found = [worker.sample_tokens().sampled_token_ids]
    for step, (computed, count) in enumerate([(16, 16), (32, 5)], 1):
        cached = CachedRequestData(["a", "b"], [None, None], [computed, step], [0, step])
        worker.execute_model(SchedulerOutput(2, [], cached, {"a": count, "b": 1}, count + 1, [], []))
        found.append(worker.sample_tokens().sampled_token_ids)
    assert len(fused) == 2
    worker.execute_model(SchedulerOutput(0, [], CachedRequestData.empty(), {}, 0, ["a", "b"], []))
    worker.sample_tokens()
    (a, _), (b, _), _ = generate(worker, msgspec.structs.replace(PLAIN, logprobs=0)).values()
    assert found == [[[], b[:1]], [[], b[1:2]], [a[:1], b[2:3]]]


def test_nan_logits_fail_one_request_and_no_other(worker: Worker, fused: list[SchedulerOutput]) -> None:
    expected = generate(worker, PLAIN)
    worker.execute_model(SchedulerOutput(0, [], CachedRequestData.empty(), {}, 0, list(PROMPTS), []))
    worker.sample_tokens()
    prompts = {"b": PROMPTS["b"], "c": PROMPTS["c"]}
    new = [new_request(req_id, 5 + 4 * index, PLAIN) for index, req_id in enumerate(prompts)]
    counts = {req_id: len(prompt) for req_id, prompt in prompts.items()}
    worker.execute_model(SchedulerOutput(1, new, CachedRequestData.empty(), counts, sum(counts.values()), [], []))
    first = worker.sample_tokens()
    assert worker._runner is not None
    for name, raw in worker._runner._kv_tensors.items():
        size = worker.get_kv_cache_specs()[name].page_size_bytes
        raw[9 * size : 10 * size].view(torch.float32).fill_(float("nan"))  # the first block of c
    fused.clear()
    cached = CachedRequestData(list(prompts), [None, None], [1, 5], [1, 1])
    worker.execute_model(SchedulerOutput(2, [], cached, {"b": 1, "c": 1}, 2, [], []))
    output = worker.sample_tokens()
    assert len(fused) == 1
    assert output.req_ids == ["b", "c"]
    assert list(output.errors) == ["c"]
    assert "NaN" in output.errors["c"]
    assert output.sampled_token_ids == [[expected["b"][0][1]], []]
    assert first.errors == {}


def test_a_rollback_takes_tokens_back(worker: Worker, fused: list[SchedulerOutput]) -> None:
    new = [new_request("c", 1, SAMPLED)]
    worker.execute_model(SchedulerOutput(1, new, CachedRequestData.empty(), {"c": 5}, 5, [], []))
    found = worker.sample_tokens().sampled_token_ids[0]

    def step(num_computed: int, num_output: int) -> list[int]:
        cached = CachedRequestData(["c"], [None], [num_computed], [num_output])
        worker.execute_model(SchedulerOutput(2, [], cached, {"c": 1}, 1, [], []))
        return worker.sample_tokens().sampled_token_ids[0]

    found += [*step(5, 1), *step(6, 2), *step(7, 3)]
    assert step(6, 2) == found[2:3]
    assert step(7, 3) == found[3:4]
    assert len(fused) == 5
    assert len(set(found)) > 1  # the control


@pytest.mark.parametrize(
    ("increments", "error", "why"),
    [
        (([3], [0], [0], [1]), IndexError, "row"),
        (([-1], [0], [0], [1]), IndexError, "row"),
        (([0], [0], [-1], [1]), IndexError, "prompt"),
        (([0], [-1], [0], [1]), IndexError, "model's length"),
        (([0], [0], [0], [9]), IndexError, "model's length"),
        (([0, 1, 2], [0, 0, 0], [0, 0, 0], [1, 1, 1]), IndexError, "requests"),
        (([0], [0], [0], [1, 1]), ValueError, "each request"),
    ],
)
def test_the_native_call_refuses_what_is_beyond_the_arrays(
    monkeypatch: pytest.MonkeyPatch, increments: tuple[list[int], ...], error: type[Exception], why: str
) -> None:
    from octavo import _native

    monkeypatch.setattr("octavo.worker.step_inputs.chosen_provider", lambda: "native")
    batch = InputBatch(max_num_seqs=3, max_model_len=8, vocab_size=10, block_sizes=[4])
    inputs = StepInputs(batch, max_tokens=6, max_reqs=2)
    assert inputs.native is not None
    columns = tuple(column.ctypes.data for column in batch.sampling_columns())
    nothing = _native.Recording(1, 1)
    step = _native.FusedStep(inputs.native, columns, nothing, (0, 0), nothing, (0, 0), 10)
    with pytest.raises(error, match=why):
        step.run(*increments)
    batch.num_prompt_tokens[:], batch.num_tokens[:] = 4, 4
    assert step.run([0, 1], [0, 0], [0, 0], [1, 2]) == [-1, -1]  # the control: chunks, nothing to sample
    assert np.array_equal(batch.num_tokens, [4, 4, 4])
