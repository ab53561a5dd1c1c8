"""EngineCore: scheduler and executor, and the step that drives them. One thread owns it.

It knows nothing of sockets, text or HTTP: requests come in as EngineCoreRequest, results go out as EngineCoreOutputs,
one for each front end that has some.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.config import OctavoConfig
from octavo.core import Scheduler, make_kv_cache_config
from octavo.engine.heartbeat import Heartbeat
from octavo.engine.step_trace import StepTrace
from octavo.errors import RequestError
from octavo.executor import Executor, Pending, make_executor
from octavo.logging import init_logger
from octavo.types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    KVCacheConfig,
    ModelRunnerOutput,
    SchedulerOutput,
)

__all__ = ["EngineCore"]

logger = init_logger(__name__)

# Methods that a front end may call by name.
_UTILITY_METHODS = ("reset_prefix_cache", "stats")

_MAX_BATCHES_IN_FLIGHT = 2


@dataclass(slots=True)
class _Batch:
    """A step that has been handed to the executor. Times are seconds of time.monotonic()."""

    scheduler_output: SchedulerOutput
    forward: Pending[None]
    sampled: Pending[ModelRunnerOutput]
    trace: dict[str, Any] | None
    schedule_seconds: float
    launched: float


class EngineCore:
    """Loads the model when constructed; then requests may be added and steps taken.

    Attributes:
        heartbeat: is told of each step's beginning and end, where others watch.

    Args:
        config: resolved configuration; ``self.config`` may have a lower ``max_model_len``, where memory asks for it.
        progress: told of the stages of loading.
        executor: instead of the one that the configuration names (tests).
        started: when loading began, seconds of time.monotonic(); default: now.
    """

    def __init__(
        self,
        config: OctavoConfig,
        progress: Callable[[str, float], None] | None = None,
        executor: Executor | None = None,
        started: float | None = None,
    ) -> None:
        started = time.monotonic() if started is None else started
        self.config = config
        trace_file = config.observability.step_trace
        self.step_trace = StepTrace(trace_file) if trace_file is not None else None
        self.executor = executor if executor is not None else make_executor(config)
        self.batches: deque[_Batch] = deque()
        self.heartbeat: Heartbeat | None = None
        try:
            kernel_set, kv_cache_config = self._load(progress if progress is not None else _ignore)
            self.scheduler = Scheduler(self.config, kv_cache_config, kernel_set)
        except BaseException:
            self.shutdown()
            raise
        self.next_outputs = self.step_with_batch_queue if config.scheduler.async_scheduling else self.step
        self.ready = EngineReady(
            max_model_len=self.config.model.max_model_len,
            num_kv_blocks=kv_cache_config.num_blocks - 1,
            block_size=config.cache.block_size,
            load_seconds=time.monotonic() - started,
        )

    def _load(self, progress: Callable[[str, float], None]) -> tuple[str, KVCacheConfig]:
        kernel_set = self.executor.load_model(progress)
        progress("kv cache", 0.0)
        specs = self.executor.get_kv_cache_specs()
        available = self.executor.determine_available_memory()
        kv_cache_config, max_model_len = make_kv_cache_config(specs, available, self.config)
        if max_model_len < self.config.model.max_model_len:
            logger.warning(
                "max_model_len lowered from %d to %d tokens: the KV cache has no memory for more",
                self.config.model.max_model_len,
                max_model_len,
            )
            model = dataclasses.replace(self.config.model, max_model_len=max_model_len)
            reasons = self.config.reasons | {"max_model_len": "the longest that the KV cache's memory allows"}
            self.config = dataclasses.replace(self.config, model=model, reasons=reasons)
        self.executor.initialize_from_config(kv_cache_config, max_model_len)
        progress("kv cache", 1.0)
        return kernel_set, kv_cache_config

    # ---- requests ---------------------------------------------------------------------------------------------------

    def add_request(self, *sequences: EngineCoreRequest) -> None:
        """Queues a request, all of its sequences or none; RequestError if it can never be served, or not now."""
        self.scheduler.add_request(*sequences)

    def abort_requests(self, request_ids: Iterable[str]) -> dict[int, EngineCoreOutputs]:
        """Ends requests now, wherever they are; ids that are not known are ignored. Returns their last outputs."""
        return self.scheduler.abort_requests(request_ids)

    def abort_all(self) -> dict[int, EngineCoreOutputs]:
        """Ends every request now. Returns their last outputs."""
        return self.abort_requests(list(self.scheduler.requests))

    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return bool(self.batches) or self.scheduler.has_unfinished_requests()

    # ---- the step ---------------------------------------------------------------------------------------------------

    def step(self) -> dict[int, EngineCoreOutputs]:
        """schedule → execute_model → sample_tokens → update_from_output; returns outputs by client index."""
        return self._settle_batch() if self._launch_batch() else {}

    def step_with_batch_queue(self) -> dict[int, EngineCoreOutputs]:
        """The same with two batches in flight: while one runs the next is scheduled, its input tokens still unknown
        to the scheduler. Results are taken in the order of the launches; {} while the second place is being filled."""
        launched = len(self.batches) < _MAX_BATCHES_IN_FLIGHT and self._launch_batch()
        if launched and len(self.batches) < _MAX_BATCHES_IN_FLIGHT:
            return {}
        return self._settle_batch() if self.batches else {}

    def _launch_batch(self) -> bool:
        """Schedules a step and hands it to the executor; False if there was nothing to schedule."""
        started = time.monotonic()
        scheduler_output = self.scheduler.schedule()
        if scheduler_output.total_num_scheduled_tokens == 0:
            return False
        trace = None
        if self.step_trace is not None and self.step_trace.active:
            trace = self.scheduler.step_trace(scheduler_output) | {"in_flight": len(self.batches) + 1}
        launched = time.monotonic()
        if self.heartbeat is not None and not self.batches:
            self.heartbeat.begin_step(scheduler_output.step, scheduler_output.total_num_scheduled_tokens)
        forward = self.executor.execute_model(scheduler_output)
        sampled = self.executor.sample_tokens()
        self.batches.append(_Batch(scheduler_output, forward, sampled, trace, launched - started, launched))
        return True

    def _settle_batch(self) -> dict[int, EngineCoreOutputs]:
        """Waits for the oldest batch and lets the scheduler take in its results."""
        batch = self.batches.popleft()
        batch.forward.result()
        model_output = batch.sampled.result()
        executed = time.monotonic()
        outputs = self.scheduler.update_from_output(batch.scheduler_output, model_output)
        if (stats := outputs[0].scheduler_stats) is not None:
            stats.step_seconds = executed - batch.launched
        if self.heartbeat is not None:
            self.heartbeat.end_step()
            if self.batches:
                following = self.batches[0].scheduler_output
                self.heartbeat.begin_step(following.step, following.total_num_scheduled_tokens)
        if batch.trace is not None and self.step_trace is not None:
            times = {
                "schedule": batch.schedule_seconds,
                "execute": executed - batch.launched,
                "update": time.monotonic() - executed,
            }
            milliseconds = {name: round(seconds * 1e3, 3) for name, seconds in times.items()}
            results = {
                "prompt_logprobs": sum(len(part.entries) for part in model_output.prompt_logprobs.values()),
                "graph_mode": model_output.graph_mode,
            }
            self.step_trace.write(batch.trace | results | {"times_ms": milliseconds})
        return outputs

    # ---- utilities --------------------------------------------------------------------------------------------------

    def call_utility(self, method: str, args: Sequence[Any]) -> Any:
        """Calls one of the methods that a front end may call by name; RequestError if it may not, or if it fails."""
        if method not in _UTILITY_METHODS:
            raise RequestError(f"{method!r} is not one of {', '.join(_UTILITY_METHODS)}", param="method")
        try:
            return getattr(self, method)(*args)
        except TypeError as error:
            raise RequestError(f"{method}: {error}", param="args") from error

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False if blocks are in use."""
        return self.scheduler.reset_prefix_cache()

    def stats(self) -> dict[str, float]:
        """SchedulerStats by name."""
        return msgspec.structs.asdict(self.scheduler.stats())

    def shutdown(self) -> None:
        """Releases executor and trace file; requests that are unfinished get no output."""
        self.executor.shutdown()
        self.batches.clear()
        if self.step_trace is not None:
            self.step_trace.close()


def _ignore(stage: str, share: float) -> None:
    """The progress callback of a caller who has none."""
