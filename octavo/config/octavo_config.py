"""The final configuration, frozen, with a reason for every value that nobody stated."""

from dataclasses import dataclass, field

from octavo.config.cache import CacheConfig
from octavo.config.compilation import CompilationConfig
from octavo.config.load import LoadConfig
from octavo.config.model import ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.scheduler import SchedulerConfig

__all__ = ["OctavoConfig"]


@dataclass(frozen=True, kw_only=True)
class OctavoConfig:
    """Attributes:

    reasons: field name → why it has its value (``"stated"``, ``"default"``, or a sentence).
    """

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    observability: ObservabilityConfig
    load: LoadConfig = field(default_factory=LoadConfig)
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    reasons: dict[str, str] = field(default_factory=dict)
