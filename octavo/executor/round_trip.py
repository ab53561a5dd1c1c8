"""RoundTripExecutor: sends everything that crosses between scheduler and worker through msgpack, both ways.

For tests: whatever works with it does not rely on sharing objects across that border, or on types that the wire
does not keep.
"""

from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from octavo.config import OctavoConfig
from octavo.executor.executor import Executor
from octavo.executor.uniproc import UniProcExecutor
from octavo.types import KVCacheConfig, KVCacheSpec, ModelRunnerOutput, SchedulerOutput

__all__ = ["RoundTripExecutor"]


class RoundTripExecutor:
    """Args:

    config: the final configuration.
    inner: does the work; a UniProcExecutor by default.
    """

    def __init__(self, config: OctavoConfig, inner: Executor | None = None) -> None:
        self._inner = inner or UniProcExecutor(config)

    def load_model(self, progress: Callable[[str, float], None] | None = None) -> str:
        return self._inner.load_model(progress)

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        specs = self._inner.get_kv_cache_specs()
        return msgspec.msgpack.decode(msgspec.msgpack.encode(specs), type=dict[str, KVCacheSpec])

    def determine_available_memory(self) -> int:
        return self._inner.determine_available_memory()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(kv_cache_config), type=KVCacheConfig)
        self._inner.initialize_from_config(sent, max_model_len)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(scheduler_output), type=SchedulerOutput)
        return self._inner.execute_model(sent)

    def sample_tokens(self) -> Future[ModelRunnerOutput]:
        received: Future[ModelRunnerOutput] = Future()

        def receive(done: Future[ModelRunnerOutput]) -> None:
            try:
                message = msgspec.msgpack.encode(done.result())
                received.set_result(msgspec.msgpack.decode(message, type=ModelRunnerOutput))
            except Exception as error:
                received.set_exception(error)

        self._inner.sample_tokens().add_done_callback(receive)
        return received

    def shutdown(self) -> None:
        self._inner.shutdown()
