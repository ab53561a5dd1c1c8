"""RoundTripExecutor: sends everything that crosses between scheduler and worker through msgpack, both ways.

For tests: whatever works with it does not rely on sharing objects across that border, or on types that the wire
does not keep.
"""

from collections.abc import Callable

import msgspec

from octavo.config import OctavoConfig
from octavo.executor.executor import Executor
from octavo.executor.pending import Pending
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

    def execute_model(self, scheduler_output: SchedulerOutput) -> Pending[None]:
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(scheduler_output), type=SchedulerOutput)
        return self._inner.execute_model(sent)

    def sample_tokens(self) -> Pending[ModelRunnerOutput]:
        return _Received(self._inner.sample_tokens())

    def shutdown(self) -> None:
        self._inner.shutdown()


class _Received:
    """An output that goes through msgpack when it is asked for."""

    def __init__(self, sent: Pending[ModelRunnerOutput]) -> None:
        self._sent = sent

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        message = msgspec.msgpack.encode(self._sent.result(timeout))
        return msgspec.msgpack.decode(message, type=ModelRunnerOutput)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.result(timeout)
        except Exception as error:
            return error
        return None

    def done(self) -> bool:
        return self._sent.done()
