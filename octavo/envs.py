"""Environment variables: at most fifteen, for debugging and for paths. Everything else is a flag."""

import os
from pathlib import Path

from octavo.errors import ConfigError

__all__ = [
    "LOG_FORMAT",
    "api_key",
    "cache_dir",
    "cpu_isa",
    "enable_multiprocessing",
    "hub_offline",
    "log_format",
    "log_level",
    "omp_num_threads",
]

LOG_FORMAT = "OCTAVO_LOG_FORMAT"  # --log-format sets it, for the processes of a server
_LOG_FORMATS = ("text", "json")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def api_key() -> str | None:
    """``OCTAVO_API_KEY``, or else ``VLLM_API_KEY``: the key that requests to a server must bring, where no flag states
    one."""
    return os.environ.get("OCTAVO_API_KEY") or os.environ.get("VLLM_API_KEY") or None


def cache_dir() -> Path:
    """``OCTAVO_CACHE``: where pulled models are kept. Default ``$XDG_CACHE_HOME/octavo``, i.e. ``~/.cache/octavo``."""
    stated = os.environ.get("OCTAVO_CACHE")
    if stated:
        return Path(stated)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


def cpu_isa() -> str | None:
    """``OCTAVO_CPU_ISA``: the instruction set whose kernels are used instead of the best one that the machine has
    (``generic``, ``avx2``, ``avx512``, ``avx512_vnni``, ``avx512_bf16``, ``amx``), or ``torch``: no native kernels."""
    return os.environ.get("OCTAVO_CPU_ISA") or None


def enable_multiprocessing(default: bool) -> bool:
    """``OCTAVO_ENABLE_MULTIPROCESSING``: 0 keeps EngineCore in the caller's process, 1 gives it one of its own."""
    stated = os.environ.get("OCTAVO_ENABLE_MULTIPROCESSING")
    if stated is None or stated == "":
        return default
    if stated not in ("0", "1"):
        raise ConfigError(f"OCTAVO_ENABLE_MULTIPROCESSING={stated!r}: expected 0 or 1")
    return stated == "1"


def hub_offline() -> bool:
    """``HF_HUB_OFFLINE``: when set, no model hub and no package registry is contacted."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")


def log_format() -> str:
    """``OCTAVO_LOG_FORMAT``: text (default) or json."""
    stated = os.environ.get(LOG_FORMAT)
    if stated is None or stated == "":
        return "text"
    if stated not in _LOG_FORMATS:
        raise ConfigError(f"{LOG_FORMAT}={stated!r}: expected one of {', '.join(_LOG_FORMATS)}")
    return stated


def log_level() -> str:
    """``OCTAVO_LOG_LEVEL``: DEBUG, INFO (default), WARNING or ERROR."""
    stated = os.environ.get("OCTAVO_LOG_LEVEL")
    if stated is None or stated == "":
        return "INFO"
    if stated.upper() not in _LOG_LEVELS:
        raise ConfigError(f"OCTAVO_LOG_LEVEL={stated!r}: expected one of {', '.join(_LOG_LEVELS)}")
    return stated.upper()


def omp_num_threads() -> int | None:
    """``OMP_NUM_THREADS``: most threads to compute with (of a list, the first); None where it says no number."""
    stated = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(stated) if stated.isdecimal() and int(stated) > 0 else None
