"""The CPU platform: cores and memory that this process may use, whatever the machine has in total.

In a container the affinity mask and the control group's limits count, not the hardware.
"""

import importlib.util
import os
from pathlib import Path

from octavo import envs
from octavo.errors import ConfigError
from octavo.logging import init_logger
from octavo.platforms.cgroup import cpu_quota, memory_headroom, memory_limit
from octavo.types import PlatformFacts

__all__ = ["CpuPlatform"]

logger = init_logger(__name__)


class CpuPlatform:
    """Args:

    root: where ``/proc`` and ``/sys`` are found (tests point it at a made-up tree).
    """

    name = "cpu"
    device = "cpu"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    @property
    def kernel_provider(self) -> str:
        """The native kernels, where they were built and not switched off.

        Raises:
            ConfigError: OCTAVO_CPU_ISA asks for native kernels, and there are none.
        """
        asked = envs.cpu_isa()
        if asked == "torch":
            return "torch"
        if importlib.util.find_spec("octavo._native") is None:
            if asked is not None:
                raise ConfigError(f"OCTAVO_CPU_ISA={asked!r}: the native kernels were not built; without them: torch")
            logger.warning(
                "the native kernels were not built when octavo was installed (was there no C++ compiler?): computing "
                "with torch, several times slower; install a compiler and octavo again"
            )
            return "torch"
        return "native"

    @property
    def num_threads(self) -> int:
        """Cores in the affinity mask, cut to the quota and to OMP_NUM_THREADS; a fraction of a core counts as none,
        but one is the least."""
        cores = len(os.sched_getaffinity(0))
        quota = cpu_quota(self._root)
        limits = [cores, quota, envs.omp_num_threads()]
        return max(1, min(int(limit) for limit in limits if limit is not None))

    def facts(self) -> PlatformFacts:
        return PlatformFacts(
            name=self.name,
            num_threads=self.num_threads,
            supported_dtypes=["bfloat16", "float32"],
            # Modest: a CPU's memory is shared with everything else on the machine.
            default_memory_share=0.4,
            # A tenth of a second of a small model. A step cannot be interrupted: so long can one long prompt hold up
            # everybody else. Where nobody listens, larger products are faster.
            default_max_num_batched_tokens=512,
            offline_max_num_batched_tokens=2048,
            default_max_num_seqs=128,
            default_block_size=16,
            # The kernels use every core already.
            async_scheduling=False,
        )

    def available_memory_bytes(self) -> int:
        """MemAvailable (page cache counts as free), or less where a control group allows less."""
        machine = self._meminfo("MemAvailable")
        group = memory_headroom(self._root)
        return machine if group is None else min(machine, group)

    def total_memory_bytes(self) -> int:
        """MemTotal, or less where a control group allows less."""
        machine = self._meminfo("MemTotal")
        group = memory_limit(self._root)
        return machine if group is None else min(machine, group)

    def init_threads(self) -> None:
        import torch

        torch.set_num_threads(self.num_threads)

    def describe(self) -> str:
        gib = self.available_memory_bytes() / 2**30
        return f"cpu ({self._model_name()}), {self.num_threads} threads, {gib:.1f} GiB available"

    def _meminfo(self, field: str) -> int:
        for line in (self._root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024  # the file says kB and means KiB
        raise OSError(f"{self._root / 'proc/meminfo'} has no line {field}")

    def _model_name(self) -> str:
        for line in (self._root / "proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
        return os.uname().machine
