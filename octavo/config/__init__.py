"""Configuration: frozen dataclasses, one file a concern, the command line derived from them, one resolver."""

from octavo.config.cache import CacheConfig
from octavo.config.compilation import CompilationConfig
from octavo.config.engine_args import EngineArgs
from octavo.config.load import LoadConfig
from octavo.config.model import ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.octavo_config import OctavoConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.resolve import resolve_config
from octavo.config.sampling_defaults import SAMPLING_DEFAULTS
from octavo.config.scheduler import SchedulerConfig
from octavo.config.vllm_flags import AbsentFlag, absent_flags

__all__ = [
    "SAMPLING_DEFAULTS",
    "AbsentFlag",
    "CacheConfig",
    "CompilationConfig",
    "EngineArgs",
    "LoadConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "OctavoConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "absent_flags",
    "resolve_config",
]
