"""AMX for tests: natively where the machine has it, else emulated instruction by instruction (``emulator.cpp``).

``native_levels()``: what the kernels' tests run on, ``amx`` among it. ``level(name)``: while it is open, the native
library offers that level. The C++ is compiled on first use, with ``$CXX`` and ``$CXXFLAGS`` (``make sanitize`` gives
the emulator AddressSanitizer, so that what a tile reads and writes is checked as well).
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

__all__ = [
    "HERE",
    "available",
    "emulator",
    "executed",
    "has_halves",
    "instructions",
    "level",
    "native",
    "native_levels",
]

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[2] / "build" / "tests"
EMULATOR_FLAGS = ("-mavx512f", "-mfma")
INSTRUCTION_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
# As the emulator counts them.
INSTRUCTIONS = ("ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileload", "tilestore", "tdp")


@cache
def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":")[1].split())
    return frozenset()


def native() -> bool:
    """The machine has AMX. (Linux shows no flag that it would not let a process use.)"""
    return {"amx_tile", "amx_bf16", "amx_int8"} <= _cpu_flags()


@cache
def available() -> bool:
    """The level's other instructions are AVX-512 with bf16 and VBMI; the emulator needs a compiler."""
    needed = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni", "avx512vbmi", "avx512_vbmi2"}
    return needed <= _cpu_flags() and shutil.which(_compiler()) is not None


def has_halves() -> bool:
    """AVX-512 FP16, which each processor with AMX has, and which is not emulated."""
    return available() and "avx512_fp16" in _cpu_flags()


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


@cache
def library(name: str, *flags: str) -> ctypes.CDLL:
    """The shared library of ``name``.cpp."""
    source = HERE / f"{name}.cpp"
    command = [_compiler(), "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags]
    command += os.environ.get("CXXFLAGS", "").split()
    key = hashlib.sha256(repr(command).encode() + source.read_bytes()).hexdigest()[:16]
    target = BUILD / f"{name}-{key}.so"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(partial), str(source)], check=True)
        partial.rename(target)
    return ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


def emulator() -> ctypes.CDLL:
    found = library("emulator", *EMULATOR_FLAGS)
    found.octavo_amx_executed.restype = ctypes.c_int64
    return found


def instructions() -> ctypes.CDLL:
    """The functions of ``instructions.cpp``, ready to be called."""
    if native():
        assert "amx" in native_levels()  # to find out is to ask the system for tiles, which a process has to do once
    else:
        emulator().octavo_amx_emulate(0)
    return library("instructions", *INSTRUCTION_FLAGS)


def executed() -> dict[str, int]:
    """How often each instruction was emulated so far."""
    return {name: emulator().octavo_amx_executed(index) for index, name in enumerate(INSTRUCTIONS)}


@contextmanager
def level(name: str) -> Iterator[None]:
    """The other levels need no help."""
    if name != "amx" or native():
        yield
        return
    assert emulator().octavo_amx_emulate(1) == 0
    try:
        yield
    finally:
        emulator().octavo_amx_emulate(0)


def native_levels() -> list[str]:
    from octavo.kernels.native import available_levels

    with level("amx" if available() else ""):
        return available_levels()
