"""Limits of the control groups (version 1 and 2) that this process is in.

A group is bound by the limits of all groups above it, so each path is walked up to its mount point. In a container the
path in /proc/self/cgroup is often that of the host and not visible: then the mount point is the process's own group.
"""

from collections.abc import Iterator
from pathlib import Path

__all__ = ["cpu_quota", "memory_headroom", "memory_limit"]

# Version 1 writes "no limit" as the largest multiple of the page size below 2**63.
_V1_UNLIMITED = 1 << 60


def memory_headroom(root: Path) -> int | None:
    """Bytes that may still be taken: the least of limit − use over the groups; None: no group has a limit.

    File pages that can be dropped are not counted as used.
    """
    room: list[int] = []
    for folder, limit in _memory_limits(root):
        v2 = (folder / "memory.max").exists()
        used = _number(folder / ("memory.current" if v2 else "memory.usage_in_bytes"))
        if used is None:
            continue
        droppable = _statistic(folder / "memory.stat", "inactive_file" if v2 else "total_inactive_file")
        room.append(max(0, limit - max(0, used - droppable)))
    return min(room, default=None)


def memory_limit(root: Path) -> int | None:
    """The least limit of the groups, bytes; None: none has one."""
    return min((limit for _, limit in _memory_limits(root)), default=None)


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    """(folder, bytes) of the groups that have a limit."""
    for folder in _groups(root, "memory"):
        v2 = (folder / "memory.max").exists()
        limit = _number(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
        if limit is not None and limit < _V1_UNLIMITED:
            yield folder, limit


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that the groups allow; None: no group has a quota."""
    quotas: list[float] = []
    for folder in _groups(root, "cpu"):
        if (folder / "cpu.max").exists():
            quota_text, _, period_text = _read(folder / "cpu.max").partition(" ")
            quota = int(quota_text) if quota_text.isdigit() else None
            period = int(period_text) if period_text.isdigit() else None
        else:
            quota = _number(folder / "cpu.cfs_quota_us")  # -1: none
            period = _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that bind this process for ``controller``, innermost first, in both versions."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        for mount, mounted_root in _mounts(root, controller if number != "0" else None):
            if number != "0" and controller not in controllers.split(","):
                continue
            inside = Path(path)
            if inside.is_relative_to(mounted_root):
                inside = Path("/") / inside.relative_to(mounted_root)
            folder = mount / inside.relative_to("/")
            if ".." in inside.parts or not folder.is_dir():
                folder = mount
            yield folder
            while folder != mount:
                folder = folder.parent
                yield folder


def _mounts(root: Path, controller: str | None) -> Iterator[tuple[Path, Path]]:
    """(mount point, group that is mounted there) of a version 1 controller, or of version 2 for None."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        wanted = kind == "cgroup2" if controller is None else kind == "cgroup" and controller in _flags(options)
        if wanted:
            _, _, _, mounted_root, mount, *_ = before.split()
            yield root / mount.lstrip("/"), Path(mounted_root)


def _flags(options: str) -> list[str]:
    return options.split()[-1].split(",") if options else []


def _read(path: Path) -> str:
    """The file's text; a file that is missing or closed to us says nothing."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.lstrip("-").isdigit() else None


def _statistic(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
