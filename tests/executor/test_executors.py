"""Executors: where calls run, in which order, where errors go; and that what crosses them survives the wire."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from octavo.config import OctavoConfig
from octavo.errors import ConfigError, UnsupportedError
from octavo.executor import EXECUTORS, RoundTripExecutor, UniProcExecutor, make_executor
from octavo.types import CachedRequestData, ModelRunnerOutput, PositionLogprobs, PromptLogprobs, SchedulerOutput
from tests.worker.toy import (
    MAX_MODEL_LEN,
    POISON,
    PlainScheduler,
    params,
    reference_tokens,
    toy_config,
    toy_kv_cache_config,
    toy_worker,
)

WAIT = 20.0  # seconds; reached only where something hangs


class FakeWorker:
    """Records its calls and their threads; can be held up and made to fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.output: Any = ModelRunnerOutput(
            ["a"],
            [[1]],
            [[PositionLogprobs([1, 3], [-0.5, -2.5], 1, [4])]],
            prompt_logprobs={"a": PromptLogprobs(1, [PositionLogprobs([2], [-float("inf")], 9)])},
        )
        self.received: list[SchedulerOutput] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            assert self.gate.wait(WAIT)
            self.calls.append(name)
            self.threads.add(threading.get_ident())
            if name == "execute_model":
                self.received.append(args[0])
            if self.error is not None:
                raise self.error
            return {"sample_tokens": self.output, "determine_available_memory": 7, "get_kv_cache_specs": {}}.get(name)

        return call


def step_of(step: int) -> SchedulerOutput:
    return SchedulerOutput(step, [], CachedRequestData.empty(), {}, 0, [], [])


def config_of(async_scheduling: bool = False, backend: str = "uni") -> OctavoConfig:
    return toy_config(async_scheduling=async_scheduling, distributed_executor_backend=backend)


@pytest.fixture(params=[False, True], ids=["inline", "thread"])
def executor(request: pytest.FixtureRequest) -> Any:
    worker = FakeWorker()
    executor = UniProcExecutor(config_of(request.param), worker)
    executor.load_model()
    yield executor, worker
    worker.error = None
    executor.shutdown()


# the worker's life --------------------------------------------------------------------------------------------------


def test_the_worker_is_led_through_its_life(executor: tuple[UniProcExecutor, FakeWorker]) -> None:
    uni, worker = executor
    assert uni.get_kv_cache_specs() == {}
    assert uni.determine_available_memory() == 7
    uni.initialize_from_config(toy_kv_cache_config(), MAX_MODEL_LEN)
    uni.execute_model(step_of(1)).result(WAIT)
    assert uni.sample_tokens().result(WAIT).sampled_token_ids == [[1]]
    uni.shutdown()
    uni.shutdown()
    assert worker.calls == [
        "init_device",
        "load_model",
        "get_kv_cache_specs",
        "determine_available_memory",
        "initialize_from_config",
        "compile_or_warm_up_model",
        "execute_model",
        "sample_tokens",
        "shutdown",
    ]


def test_errors_while_starting_are_raised(executor: tuple[UniProcExecutor, FakeWorker]) -> None:
    uni, worker = executor
    worker.error = ConfigError("no room")
    with pytest.raises(ConfigError, match="no room"):
        uni.determine_available_memory()


def test_errors_in_a_step_travel_in_its_future(executor: tuple[UniProcExecutor, FakeWorker]) -> None:
    uni, worker = executor
    worker.error = MemoryError("made up")
    forward, sampled = uni.execute_model(step_of(1)), uni.sample_tokens()
    assert isinstance(forward.exception(WAIT), MemoryError)
    assert isinstance(sampled.exception(WAIT), MemoryError)
    worker.error = None
    assert uni.execute_model(step_of(2)).result(WAIT) is None


def test_calls_before_loading_and_after_shutdown_say_so() -> None:
    uni = UniProcExecutor(config_of())
    with pytest.raises(RuntimeError, match="load_model"):
        uni.sample_tokens()
    uni = UniProcExecutor(config_of(), FakeWorker())
    uni.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        uni.execute_model(step_of(1))


# inline and threaded ------------------------------------------------------------------------------------------------


def test_without_async_scheduling_calls_run_at_once_in_the_caller() -> None:
    worker = FakeWorker()
    uni = UniProcExecutor(config_of(), worker)
    uni.load_model()
    assert uni.execute_model(step_of(1)).done()
    assert uni.sample_tokens().done()
    assert worker.threads == {threading.get_ident()}


def test_an_interrupt_inside_an_inline_step_reaches_the_caller() -> None:
    worker = FakeWorker()
    uni = UniProcExecutor(config_of(), worker)
    uni.load_model()
    worker.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        uni.execute_model(step_of(1))


def test_with_async_scheduling_one_thread_works_in_order_while_the_caller_goes_on() -> None:
    worker = FakeWorker()
    uni = UniProcExecutor(config_of(async_scheduling=True), worker)
    uni.load_model()
    worker.calls.clear()
    worker.gate.clear()
    futures: list[Future[Any]] = []
    for step in (1, 2, 3):
        futures += [uni.execute_model(step_of(step)), uni.sample_tokens()]
    assert worker.calls == []
    assert not any(future.done() for future in futures)
    worker.gate.set()
    for future in futures:
        future.result(WAIT)
    assert worker.calls == ["execute_model", "sample_tokens"] * 3
    assert [output.step for output in worker.received] == [1, 2, 3]
    assert len(worker.threads) == 1
    assert threading.get_ident() not in worker.threads
    uni.shutdown()


def test_shutdown_waits_for_the_work_that_was_begun_and_ends_the_thread() -> None:
    worker = FakeWorker()
    uni = UniProcExecutor(config_of(async_scheduling=True), worker)
    uni.load_model()
    before = threading.active_count()
    worker.gate.clear()
    forward = uni.execute_model(step_of(1))
    ending = threading.Thread(target=uni.shutdown)
    ending.start()
    assert not forward.done()
    worker.gate.set()
    ending.join(WAIT)
    assert forward.done()
    assert worker.calls[-2:] == ["execute_model", "shutdown"]
    assert threading.active_count() == before - 1


# the choice ---------------------------------------------------------------------------------------------------------


def test_the_configuration_names_the_executor() -> None:
    assert isinstance(make_executor(config_of(backend="uni")), UniProcExecutor)
    assert isinstance(make_executor(config_of(backend="roundtrip")), RoundTripExecutor)
    with pytest.raises(UnsupportedError, match="uni"):
        EXECUTORS.get("nowhere")


# the round trip -----------------------------------------------------------------------------------------------------


def test_nothing_is_shared_across_the_round_trip() -> None:
    worker = FakeWorker()
    executor = RoundTripExecutor(config_of(), UniProcExecutor(config_of(), worker))
    executor.load_model()
    sent = step_of(1)
    executor.execute_model(sent).result(WAIT)
    received = executor.sample_tokens().result(WAIT)
    assert worker.received[0] == sent
    assert worker.received[0] is not sent
    assert received == worker.output
    assert received is not worker.output
    assert received.logprobs[0] is not worker.output.logprobs[0]


@pytest.mark.parametrize(
    "output", [ModelRunnerOutput(["a"], [[object()]], [None]), ModelRunnerOutput([5], [[1]], [None])]
)  # type: ignore[list-item]
def test_control_an_output_that_the_wire_does_not_keep_is_an_error(output: ModelRunnerOutput) -> None:
    worker = FakeWorker()
    executor = RoundTripExecutor(config_of(), UniProcExecutor(config_of(), worker))
    executor.load_model()
    worker.output = output
    executor.execute_model(step_of(1))
    assert executor.sample_tokens().exception(WAIT) is not None


def test_errors_pass_through_the_round_trip() -> None:
    worker = FakeWorker()
    executor = RoundTripExecutor(config_of(), UniProcExecutor(config_of(), worker))
    executor.load_model()
    worker.error = MemoryError("made up")
    assert isinstance(executor.execute_model(step_of(1)).exception(WAIT), MemoryError)
    assert isinstance(executor.sample_tokens().exception(WAIT), MemoryError)


# with a real worker -------------------------------------------------------------------------------------------------

PROMPTS = {"a": [20, 21, 22], "b": [23] * 7, "c": [24, 25]}
SAMPLING = {"a": params(), "b": params(seed=4, temperature=1.0, top_p=0.9), "c": params(logprobs=2)}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("backend", ["uni", "roundtrip"])
def test_two_steps_in_flight_give_the_tokens_of_each_request_alone(backend: str, async_scheduling: bool) -> None:
    config = config_of(async_scheduling, backend)
    worker, _ = toy_worker(config)
    executor: Any = UniProcExecutor(config, worker)
    if backend == "roundtrip":
        executor = RoundTripExecutor(config, executor)
    executor.load_model()
    executor.get_kv_cache_specs()
    executor.initialize_from_config(toy_kv_cache_config(), MAX_MODEL_LEN)

    scheduler = PlainScheduler()
    for req_id, prompt in PROMPTS.items():
        scheduler.add(req_id, prompt, SAMPLING[req_id])
    plan = [{"a": 3, "b": 4}, {"a": 1, "b": 3}, {"c": 2, "b": 1, "a": 1}, {"a": 1, "c": 1}, {"b": 1, "c": 1}]
    results: list[Future[ModelRunnerOutput]] = []
    for step in plan:
        executor.execute_model(scheduler.schedule(**step))
        results.append(executor.sample_tokens())
        if len(results) == 2:  # the step before the last one: two have been in flight
            scheduler.receive(results.pop(0).result(WAIT))
    scheduler.receive(results.pop().result(WAIT))
    executor.shutdown()
    for req_id, request in scheduler.requests.items():
        count = sum(req_id in step for step in plan) - (req_id == "b")  # b's first step is half of its prompt
        assert request.outputs == reference_tokens(PROMPTS[req_id], SAMPLING[req_id], count)
    assert len(scheduler.requests["c"].logprobs) == 3


def test_a_request_that_fails_with_its_next_step_in_flight_harms_no_other() -> None:
    config = config_of(async_scheduling=True)
    executor = UniProcExecutor(config, toy_worker(config)[0])
    executor.load_model()
    executor.get_kv_cache_specs()
    executor.initialize_from_config(toy_kv_cache_config(), MAX_MODEL_LEN)
    scheduler = PlainScheduler()
    sick = scheduler.add("sick", [20, POISON], params())
    well = scheduler.add("well", [21], params())
    results = []
    for step in ({"sick": 2, "well": 1}, {"sick": 1, "well": 1}):
        executor.execute_model(scheduler.schedule(**step))
        results.append(executor.sample_tokens())
    for result in results:
        scheduler.receive(result.result(WAIT))
    executor.shutdown()
    assert (sick.outputs, well.outputs) == ([], reference_tokens([21], params(), 2))
    assert sick.error is not None
