"""What crosses rooms, as msgspec structs and plain dataclasses. Knows nothing of torch, sockets or HTTP."""

from octavo.types.engine_io import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineDead,
    EngineOutput,
    EngineProgress,
    EngineReady,
    FinishReason,
    PositionLogprobs,
    RequestMetrics,
    SchedulerStats,
    UtilityRequest,
    UtilityResult,
)
from octavo.types.facts import ModelFacts, PlatformFacts
from octavo.types.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from octavo.types.outputs import CompletionOutput, Logprob, RequestOutput, SampleLogprobs
from octavo.types.sampling_params import MAX_CHOICES, RequestOutputKind, SamplingParams
from octavo.types.scheduler_output import (
    BlockIds,
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)

__all__ = [
    "MAX_CHOICES",
    "BlockIds",
    "CachedRequestData",
    "CompletionOutput",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineCoreRequestType",
    "EngineDead",
    "EngineOutput",
    "EngineProgress",
    "EngineReady",
    "FinishReason",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheSpec",
    "KVCacheTensor",
    "Logprob",
    "ModelFacts",
    "ModelRunnerOutput",
    "NewRequestData",
    "PlatformFacts",
    "PositionLogprobs",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SampleLogprobs",
    "SamplingParams",
    "SchedulerOutput",
    "SchedulerStats",
    "SlidingWindowSpec",
    "UtilityRequest",
    "UtilityResult",
]
