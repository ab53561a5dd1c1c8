"""Custom logits processors: named at start-up, used by the requests that bring arguments, and nobody else's trouble."""

from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.sample import RowChanges, Sampler, load_logits_processors
from octavo.types import SamplingParams
from octavo.worker import Worker
from tests.sample.test_sampler import Row, metadata_of
from tests.worker.processors import NAMES, Boost
from tests.worker.toy import PlainScheduler, ToyModel, params, reference_tokens, start, toy_config, toy_worker

HERE = "tests.worker.processors"


@pytest.fixture
def worker() -> Worker:
    worker, _ = toy_worker(toy_config(logits_processors=NAMES))
    start(worker)
    return worker


def advance(worker: Worker, scheduler: PlainScheduler, steps: int = 1) -> None:
    for _ in range(steps):
        going = {name: r.num_tokens - r.computed for name, r in scheduler.requests.items() if r.error is None}
        scheduler.step(worker, **going)


def test_each_request_gets_what_its_own_arguments_say(worker: Worker) -> None:
    scheduler = PlainScheduler()
    arguments: list[dict[str, Any]] = [{"boost": 100.0}, {}, {"boost": 2.0}]
    requests = [
        scheduler.add(f"r{index}", [20 + index], params(extra_args=extra_args))
        for index, extra_args in enumerate(arguments)
    ]
    advance(worker, scheduler, 4)
    assert requests[0].outputs == [20, 21, 22, 23]
    for request in requests:
        assert request.outputs == reference_tokens(request.prompt, request.params, 4)


def test_a_preempted_request_goes_on_with_the_tokens_it_had(worker: Worker) -> None:
    scheduler = PlainScheduler()
    scheduler.add("a", [30, 31], params(extra_args={"boost": 100.0}))
    advance(worker, scheduler, 3)
    scheduler.preempt("a")
    advance(worker, scheduler, 2)
    assert scheduler.requests["a"].outputs == [30, 31, 32, 33, 34]


def test_raw_logprobs_are_not_touched_and_masks_come_before(worker: Worker) -> None:
    scheduler = PlainScheduler()
    free = scheduler.add("free", [30], params(logprobs=4))
    boosted = scheduler.add("boosted", [30], params(logprobs=4, extra_args={"boost": 100.0}))
    # What is forbidden is at -inf already; adding to it changes nothing.
    forbidden = scheduler.add("forbidden", [30], params(extra_args={"boost": 100.0}, bad_words_token_ids=[[30]]))
    advance(worker, scheduler)
    assert boosted.outputs == [30]
    assert boosted.logprobs[0].token_ids[1:] == free.logprobs[0].token_ids[1:]
    assert boosted.logprobs[0].logprobs[1:] == free.logprobs[0].logprobs[1:]
    assert forbidden.outputs != [30]


FAULTS = {
    "new_request": "logits processor Faulty failed: KeyError: 'made up'",
    "raises": "logits processor Faulty failed: RuntimeError: made up\\x0ain two lines",
    "shape": "logits processor Faulty must return [53] float32 logits, got [52] float32",
    "dtype": "logits processor Faulty must return [53] float32 logits, got [53] float64",
    "nan": "logits processor Faulty returned NaN logits",
    "nothing": "logits processor Faulty must return [53] float32 logits, got NoneType",
}


@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_goes_wrong_fails_that_request_alone(worker: Worker, fault: str, temperature: float) -> None:
    scheduler = PlainScheduler()
    well = [scheduler.add(f"well{seed}", [20 + seed], params(seed=seed, temperature=temperature)) for seed in range(2)]
    used = scheduler.add("used", [25], params(extra_args={"boost": 3.0}))
    after = 0 if fault == "new_request" else 2
    sick = scheduler.add("sick", [24], params(logprobs=1, extra_args={"fault": fault, "after": after}))
    advance(worker, scheduler, 4)
    assert sick.error == FAULTS[fault]
    assert len(sick.outputs) == len(sick.logprobs) == after
    for request in (*well, used):
        assert request.error is None
        assert request.outputs == reference_tokens(request.prompt, request.params, 4)


def test_failures_do_not_flood_the_log(worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    """Clients can bring them about as often as they like: one traceback for each class and kind, then a line each."""

    scheduler = PlainScheduler()

    def fail(fault: str, count: int) -> str:
        for _ in range(count):
            scheduler.add(f"r{len(scheduler.requests)}", [24], params(extra_args={"fault": fault}))
        advance(worker, scheduler)
        return capsys.readouterr().err

    fail("raises", 1)
    assert fail("raises", 3).count("\n") == 3
    first, second = fail("overflows", 1), fail("overflows", 1)
    assert first.count("Traceback") == 1  # control: another kind has a traceback of its own
    assert first.splitlines()[0].endswith("logits processor Faulty failed: OverflowError: made up")
    assert second.count("\n") == 1


def test_a_processor_may_keep_the_row_and_write_to_it_later() -> None:
    kept: list[torch.Tensor] = []

    def keep(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        for earlier in kept:
            earlier.fill_(99.0)
        kept.append(logits)
        return logits

    rows = [Row(num_logprobs=2), Row(num_logprobs=2)]
    metadata = metadata_of(rows)
    changing = metadata_of(rows, {index: RowChanges(processors=[("Keep", keep)]) for index in range(2)})
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]])
    plain, found = Sampler()(logits.clone(), metadata), Sampler()(logits.clone(), changing)
    assert found.token_ids.tolist() == plain.token_ids.tolist() == [1, 2]
    assert found.logprobs == plain.logprobs
    assert np.array_equal(logits, [[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]])


# names --------------------------------------------------------------------------------------------------------------


def test_processors_are_loaded_by_name() -> None:
    assert load_logits_processors([f"{HERE}:Boost"]) == [Boost]
    assert load_logits_processors([]) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Boost", "must name classes as module:Class"),
        (f"{HERE}.Boost", "must name classes as module:Class"),
        ("no.such.module:Boost", "cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:Missing", "cannot be imported: AttributeError"),
        (f"{HERE}:NoProcessor", "must be a subclass of octavo.sample.LogitsProcessor"),
        (f"{HERE}:boosted", "must be a subclass of octavo.sample.LogitsProcessor"),
        (f"{HERE}:Unfinished", "with a new_request method"),
        (f"{HERE}:Unmakeable", "Unmakeable cannot be made: OSError: made up"),
    ],
)
def test_a_name_that_is_wrong_is_told_before_the_weights_are_read(name: str, message: str) -> None:
    loads: list[int] = []

    def load(config: object, progress: object) -> ToyModel:
        loads.append(1)
        return ToyModel()

    with pytest.raises(ConfigError, match="--logits-processors") as caught:
        Worker(toy_config(logits_processors=[name]), load).load_model()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert loads == []


def test_arguments_are_checked_in_the_front_end() -> None:
    Boost.validate_params(SamplingParams(extra_args={"boost": 1.0}))
    with pytest.raises(ValueError, match="boost must be a number"):
        Boost.validate_params(SamplingParams(extra_args={"boost": "much"}))
