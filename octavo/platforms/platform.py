"""The platform protocol and the choice of one. Nobody asks a platform what it is: only what it has and recommends."""

from functools import cache
from typing import Protocol, cast

from octavo.registry import Registry
from octavo.types import PlatformFacts

__all__ = ["REGISTRY", "Platform", "current_platform"]

REGISTRY = Registry("platform", {"cpu": "octavo.platforms.cpu:CpuPlatform"})


class Platform(Protocol):
    """At most fifteen members.

    Attributes:
        name: key in the registry.
        device: torch's name of the device that the model lives on.
    kernel_provider: whose kernels are used.
    """

    name: str
    device: str

    @property
    def kernel_provider(self) -> str: ...

    def facts(self) -> PlatformFacts:
        """What configuration is resolved from."""
        ...

    def available_memory_bytes(self) -> int:
        """Memory that can still be taken, in bytes, as far as this process is allowed to."""
        ...

    def total_memory_bytes(self) -> int:
        """Memory that this process could take if nobody else took any, in bytes."""
        ...

    def init_threads(self) -> None:
        """Sizes torch's thread pool by the cores that this process may use."""
        ...

    def describe(self) -> str:
        """One line for the log."""
        ...


@cache
def current_platform() -> Platform:
    """The platform of this machine. The CPU is the only one so far."""
    return cast(Platform, REGISTRY.get("cpu")())
