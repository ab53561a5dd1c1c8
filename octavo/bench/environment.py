"""What there is to compute with: for ``octavo collect-env``, and to be read beside a measurement."""

import os
import platform
from importlib import metadata

from octavo import __version__
from octavo.errors import ConfigError
from octavo.platforms import current_platform

__all__ = ["describe_environment"]

_PACKAGES = ("numpy", "tokenizers", "safetensors", "huggingface_hub", "msgspec", "pyzmq", "fastapi", "transformers")
# Those that octavo reads; others may be nobody's business.
_VARIABLES = (
    "OCTAVO_CACHE",
    "OCTAVO_CPU_ISA",
    "OCTAVO_ENABLE_MULTIPROCESSING",
    "OCTAVO_LOG_FORMAT",
    "OCTAVO_LOG_LEVEL",
    "OMP_NUM_THREADS",
    "HF_HUB_OFFLINE",
)


def describe_environment() -> dict[str, str]:
    """What is described → in one line each."""
    import torch

    here = current_platform()
    facts = here.facts()
    variables = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "octavo": __version__,
        "python": f"{platform.python_version()} ({platform.platform()})",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, "
        f"CPU capability {torch.backends.cpu.get_cpu_capability()}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "platform": here.describe(),
        "kernels": _kernels(),
        "threads": f"{facts.num_threads} of {os.cpu_count()} cores (affinity, quota and OMP_NUM_THREADS count)",
        "memory": f"{here.available_memory_bytes() / 2**30:.1f} GiB available of {total / 2**30:.1f} GiB",
        "environment": " ".join(variables) or "nothing is set",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _kernels() -> str:
    """The chosen instruction set, and all that this machine could run; or why there are none."""
    from octavo import kernels

    try:
        provider = current_platform().kernel_provider
        kernels.select(provider)
    except ConfigError as error:
        return f"none: {error}"
    if provider != "native":
        return provider
    from octavo.kernels.native import available_levels

    return f"{kernels.kernel_set()} (this machine can run {', '.join(available_levels())})"
