"""The Executor protocol, what it drives, and the registries of both."""

from collections.abc import Callable
from typing import Protocol, cast

from octavo.config import OctavoConfig
from octavo.executor.pending import Pending
from octavo.registry import Registry
from octavo.types import KVCacheConfig, KVCacheSpec, ModelRunnerOutput, SchedulerOutput

__all__ = ["EXECUTORS", "WORKERS", "Executor", "WorkerLike", "make_executor"]

EXECUTORS = Registry(
    "distributed executor backend",
    {
        "uni": "octavo.executor.uniproc:UniProcExecutor",
        "roundtrip": "octavo.executor.round_trip:RoundTripExecutor",
    },
)
WORKERS = Registry("worker", {"cpu": "octavo.worker:Worker"})


class WorkerLike(Protocol):
    """What an executor needs of a worker; octavo.worker.Worker describes each method."""

    def init_device(self) -> None: ...
    def load_model(self, progress: Callable[[str, float], None] | None = None) -> str: ...
    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]: ...
    def determine_available_memory(self) -> int: ...
    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None: ...
    def compile_or_warm_up_model(self) -> None: ...
    def execute_model(self, scheduler_output: SchedulerOutput) -> None: ...
    def sample_tokens(self) -> ModelRunnerOutput: ...
    def shutdown(self) -> None: ...


class Executor(Protocol):
    """Drives the workers. Calls take effect in the order in which they are made."""

    def load_model(self, progress: Callable[[str, float], None] | None = None) -> str:
        """Initialises the device and loads the weights; ``progress(stage, share)`` may come from another thread.

        Returns:
            Name of the kernels that compute the KV: part of every prefix cache hash.
        """
        ...

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """What each attention layer keeps for a token, by layer name."""
        ...

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache may take."""
        ...

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        """Allocates the KV cache and warms the model up."""
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> Pending[None]:
        """Begins the forward of a step. What goes wrong in it is raised by its result()."""
        ...

    def sample_tokens(self) -> Pending[ModelRunnerOutput]:
        """Samples from the forward begun last. To be called once after each execute_model()."""
        ...

    def shutdown(self) -> None:
        """Ends the workers once the work begun is done. May be called twice."""
        ...


def make_executor(config: OctavoConfig) -> Executor:
    """The executor that ``--distributed-executor-backend`` names."""
    return cast(Executor, EXECUTORS.get(config.parallel.distributed_executor_backend)(config))
