"""Configuration: frozen dataclasses, one file a concern, the command line derived from them, one resolver."""

from octavo.config.access import AccessConfig
from octavo.config.answer import AnswerConfig
from octavo.config.cache import CacheConfig
from octavo.config.compilation import CompilationConfig
from octavo.config.engine_args import EngineArgs
from octavo.config.http import HttpConfig
from octavo.config.limits import LimitsConfig
from octavo.config.load import LoadConfig
from octavo.config.logs import LogsConfig
from octavo.config.model import QUANTIZED_WHILE_LOADING, ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.octavo_config import OctavoConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.resolve import resolve_config
from octavo.config.sampling_defaults import SAMPLING_DEFAULTS
from octavo.config.scheduler import SchedulerConfig
from octavo.config.server_config import ServerConfig
from octavo.config.vllm_flags import AbsentFlag, absent_flags
from octavo.config.yaml_text import load_yaml

__all__ = [
    "QUANTIZED_WHILE_LOADING",
    "SAMPLING_DEFAULTS",
    "AbsentFlag",
    "AccessConfig",
    "AnswerConfig",
    "CacheConfig",
    "CompilationConfig",
    "EngineArgs",
    "HttpConfig",
    "LimitsConfig",
    "LoadConfig",
    "LogsConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "OctavoConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "absent_flags",
    "load_yaml",
    "resolve_config",
]
