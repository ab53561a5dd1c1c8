"""The CPU platform sees what this process may use: affinity mask and control groups, not the hardware."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.errors import UnsupportedError
from octavo.platforms import REGISTRY, Platform, current_platform

GIB = 2**30
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)

MakePlatform = Callable[..., Platform]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePlatform:
    """``machine(files, cores=8)``: the platform on a made-up machine with 32 GiB available."""

    def make(files: dict[str, str] | None = None, cores: int = 8) -> Platform:
        defaults = {
            "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable:   {32 * 2**20} kB\nMemFree: 1 kB\n",
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Made-up CPU\n",
        }
        for name, text in (defaults | (files or {})).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        platform: Platform = REGISTRY.get("cpu")(root=tmp_path)
        return platform

    return make


def v2(groups: dict[str, str], group: str = "/a/b") -> dict[str, str]:
    files = {f"sys/fs/cgroup/{name}": text for name, text in groups.items()}
    return {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": V2_MOUNT, **files}


def v1(files: dict[str, str], group: str = "/a/b") -> dict[str, str]:
    found = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    lines = f"9:name=systemd:/\n4:memory:{group}\n1:cpu,cpuacct:{group}\n0::/\n"
    return {"proc/self/cgroup": lines, "proc/self/mountinfo": V1_MOUNTS, **found}


def test_without_control_groups_the_machine_is_the_limit(machine: MakePlatform) -> None:
    platform = machine()
    assert platform.available_memory_bytes() == 32 * GIB
    assert platform.facts().num_threads == 8


def test_affinity_mask_bounds_the_threads(machine: MakePlatform) -> None:
    assert machine(cores=3).facts().num_threads == 3


def test_v2_memory_limit_minus_use_bounds_the_memory(machine: MakePlatform) -> None:
    files = {"a/b/memory.max": f"{4 * GIB}\n", "a/b/memory.current": f"{GIB}\n", "a/b/memory.stat": "anon 5\n"}
    assert machine(v2(files)).available_memory_bytes() == 3 * GIB


def test_v2_droppable_file_pages_count_as_free(machine: MakePlatform) -> None:
    files = {
        "a/b/memory.max": f"{4 * GIB}",
        "a/b/memory.current": f"{3 * GIB}",
        "a/b/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file 7\n",
    }
    assert machine(v2(files)).available_memory_bytes() == 3 * GIB


def test_v2_the_tightest_group_above_counts(machine: MakePlatform) -> None:
    files = {
        "a/b/memory.max": f"{3 * GIB}",
        "a/b/memory.current": "0",
        "a/memory.max": f"{2 * GIB}",
        "a/memory.current": "0",
        "a/b/cpu.max": "400000 100000",
        "a/cpu.max": "200000 100000",
    }
    platform = machine(v2(files))
    assert platform.available_memory_bytes() == 2 * GIB
    assert platform.facts().num_threads == 2


def test_v2_max_is_no_limit(machine: MakePlatform) -> None:
    files = {"a/b/memory.max": "max\n", "a/b/memory.current": "5\n", "a/b/cpu.max": "max 100000\n"}
    platform = machine(v2(files))
    assert platform.available_memory_bytes() == 32 * GIB
    assert platform.facts().num_threads == 8


@pytest.mark.parametrize("group", ["/docker/abc", "/../outside"])
def test_a_group_path_that_a_container_cannot_see_stands_for_its_mount_point(machine: MakePlatform, group: str) -> None:
    files = {"memory.max": f"{GIB}", "memory.current": "0", "cpu.max": "100000 100000"}
    platform = machine(v2(files, group=group))
    assert platform.available_memory_bytes() == GIB
    assert platform.facts().num_threads == 1


def test_v1_limits(machine: MakePlatform) -> None:
    files = {
        "memory/a/b/memory.limit_in_bytes": f"{4 * GIB}",
        "memory/a/b/memory.usage_in_bytes": f"{2 * GIB}",
        "memory/a/b/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
        "cpu,cpuacct/a/b/cpu.cfs_quota_us": "350000",
        "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
    }
    platform = machine(v1(files))
    assert platform.available_memory_bytes() == 3 * GIB
    assert platform.facts().num_threads == 3


def test_v1_without_limits(machine: MakePlatform) -> None:
    files = {
        "memory/a/b/memory.limit_in_bytes": "9223372036854771712",
        "memory/a/b/memory.usage_in_bytes": "1000",
        "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
    }
    platform = machine(v1(files))
    assert platform.available_memory_bytes() == 32 * GIB
    assert platform.facts().num_threads == 8


@pytest.mark.parametrize(("stated", "threads"), [("2", 2), ("2,4", 2), ("64", 8), ("", 8), ("0", 8), ("many", 8)])
def test_omp_num_threads_lowers_the_number_of_threads(
    machine: MakePlatform, monkeypatch: pytest.MonkeyPatch, stated: str, threads: int
) -> None:
    platform = machine()
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert platform.facts().num_threads == threads


def test_less_than_a_core_is_one_thread(machine: MakePlatform) -> None:
    assert machine(v2({"a/b/cpu.max": "50000 100000"})).facts().num_threads == 1


def test_memory_over_its_limit_leaves_nothing(machine: MakePlatform) -> None:
    files = {"a/b/memory.max": f"{GIB}", "a/b/memory.current": f"{2 * GIB}"}
    assert machine(v2(files)).available_memory_bytes() == 0


def test_description_is_one_line_with_the_numbers(machine: MakePlatform) -> None:
    assert machine(cores=3).describe() == "cpu (Made-up CPU), 3 threads, 32.0 GiB available"


def test_threads_of_torch_follow_the_platform(machine: MakePlatform) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        machine(cores=1).init_threads()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_this_machine_has_a_platform_with_memory_and_threads() -> None:
    platform = current_platform()
    facts = platform.facts()
    assert platform is current_platform()
    assert (facts.name, platform.device) == ("cpu", "cpu")
    assert facts.supported_dtypes == ["bfloat16", "float32"]
    assert 1 <= facts.num_threads <= len(os.sched_getaffinity(0))
    assert platform.available_memory_bytes() > 0


def test_an_unknown_platform_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="platform 'abacus' is not supported; supported: cpu"):
        REGISTRY.get("abacus")


def test_a_platform_has_at_most_fifteen_members() -> None:
    members = [name for name in dir(current_platform()) if not name.startswith("_")]
    assert len(members) <= 15
