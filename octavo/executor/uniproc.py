"""UniProcExecutor: one worker inside the engine's process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar, cast

from octavo.config import OctavoConfig
from octavo.executor.executor import WORKERS, WorkerLike
from octavo.executor.pending import Done, Pending
from octavo.platforms import current_platform
from octavo.types import KVCacheConfig, KVCacheSpec, ModelRunnerOutput, SchedulerOutput

__all__ = ["UniProcExecutor"]

P = ParamSpec("P")
R = TypeVar("R")


class UniProcExecutor:
    """Without async scheduling every call runs at once, in the caller's thread, and its result is there when it
    returns. With it all calls run in one thread of the executor's own, in order, while the caller schedules the next
    step.

    Args:
        config: the final configuration.
        worker: what to drive; by default the platform's worker, made when the model is loaded.
    """

    def __init__(self, config: OctavoConfig, worker: WorkerLike | None = None) -> None:
        self._config = config
        self._worker = worker
        self._thread: ThreadPoolExecutor | None = None
        if config.scheduler.async_scheduling:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-worker")
        self._ended = False

    def load_model(self, progress: Callable[[str, float], None] | None = None) -> str:
        def load() -> str:
            if self._worker is None:
                self._worker = WORKERS.get(current_platform().name)(self._config)
            self._worker.init_device()
            return self._worker.load_model(progress)

        return self._submit(load).result()

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self._submit(self._ready().get_kv_cache_specs).result()

    def determine_available_memory(self) -> int:
        return self._submit(self._ready().determine_available_memory).result()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        self._submit(self._ready().initialize_from_config, kv_cache_config, max_model_len).result()
        self._submit(self._ready().compile_or_warm_up_model).result()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Pending[None]:
        return self._submit(self._ready().execute_model, scheduler_output)

    def sample_tokens(self) -> Pending[ModelRunnerOutput]:
        return self._submit(self._ready().sample_tokens)

    def shutdown(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if self._worker is not None:
            self._worker.shutdown()

    def _ready(self) -> WorkerLike:
        if self._worker is None or self._ended:
            raise RuntimeError("the executor has no worker: load_model() comes first, and nothing after shutdown()")
        return self._worker

    def _submit(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        if self._thread is not None:
            return self._thread.submit(call, *args, **kwargs)
        try:
            return Done(call(*args, **kwargs))
        except Exception as error:  # what is no Exception (Ctrl-C) goes straight to the caller
            return Done(cast(R, None), error)
