"""The native provider: the C++ kernels of ``csrc/cpu``, given the addresses and sizes of tensors.

A kernel would read whatever memory it is pointed to, so types and sizes are checked here, and what is in index tensors
by the library.

The level (instruction set) is the best that the machine has, or the one that ``OCTAVO_CPU_ISA`` names. Ops that have no
kernel here are computed by their definitions.
"""

from typing import Any

from octavo import _native, envs
from octavo.errors import ConfigError
from octavo.kernels.native import attention, dequantize, products, quantize, rows
from octavo.kernels.native.recording import record_forward
from octavo.kernels.op import Provider
from octavo.logging import init_logger
from octavo.platforms import current_platform

__all__ = ["available_levels", "native_provider"]

logger = init_logger(__name__)


def available_levels() -> list[str]:
    """Instruction sets that this machine has kernels for, best first."""
    found: list[str] = _native.available_levels()
    return found


def native_provider() -> Provider:
    """The kernels of the chosen level, with as many threads as this process may use.

    Raises:
        ConfigError: OCTAVO_CPU_ISA names a level that is unknown or that this machine cannot run.
    """
    levels, refused = available_levels(), dict(_native.refused_levels())
    level = envs.cpu_isa() or levels[0]
    if level not in levels:
        why = f"; {level}: {refused[level]}" if level in refused else ""
        raise ConfigError(f"OCTAVO_CPU_ISA={level!r}: this machine can run {', '.join(levels)} (or torch){why}")
    for name, reason in refused.items():
        logger.warning("the kernels of level %s, which this processor has, are not used: %s", name, reason)
    _native.choose(level, current_platform().facts().num_threads)
    return Provider(
        name="native", kernel_set=f"native-{level}", implementations=_KERNELS, record_forward=record_forward
    )


_KERNELS: dict[str, Any] = {
    name: getattr(module, name)
    for module in (attention, dequantize, products, quantize, rows)
    for name in module.__all__
}
