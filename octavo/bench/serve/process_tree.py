"""What a server's processes use: processor time and memory (PSS) of each, by its role, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path, PurePath

from octavo.errors import ConfigError

__all__ = ["ProcessUse", "read_processes"]

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """``cpu_s``: since the process began. ``pss_mb``: its own memory and its share of what it shares; None: not
    asked for."""

    pid: int
    role: str
    cpu_s: float
    pss_mb: float | None


def read_processes(root: int, *, memory: bool) -> list[ProcessUse]:
    """Process ``root`` and all that descend from it.

    Args:
        memory: read that, too; it takes milliseconds a process.

    Raises:
        ConfigError: there is no such process, or it cannot be looked into.
    """
    pids = [root]
    children = _children()
    for pid in pids:  # which grows meanwhile
        pids += children.get(pid, [])
    found = [use for pid in pids if (use := _read(pid, memory)) is not None]
    if not found or found[0].pid != root:
        raise ConfigError(f"--server-pid {root}: there is no such process on this machine")
    return found


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(path)
        if fields is not None:
            found.setdefault(int(fields[1]), []).append(int(path.parent.name))
    return found


def _stat(path: Path) -> list[str] | None:
    """The fields after the name, which may contain anything: state, parent, …; None: it has ended."""
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _read(pid: int, memory: bool) -> ProcessUse | None:
    folder = Path("/proc", str(pid))
    fields = _stat(folder / "stat")
    if fields is None or fields[0] == "Z":
        return None
    return ProcessUse(
        pid, _role(folder), (int(fields[11]) + int(fields[12])) / _TICKS, _pss(folder) if memory else None
    )


def _pss(folder: Path) -> float | None:
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()
    except PermissionError as error:
        raise ConfigError(
            f"--server-pid: the memory of process {folder.name} cannot be read: {error.strerror}"
        ) from error
    except OSError:  # it has ended
        return None
    (line,) = (line for line in lines if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024 / 1e6


def _role(folder: Path) -> str:
    """What it runs, in a word or two: ``vllm serve``, ``octavo.engine.core_proc``; or what it calls itself."""
    try:
        words = (folder / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        words = [""]
    program = PurePath(words[0]).name
    if not program.startswith("python"):
        return " ".join(words)[:60] or "unknown"
    options = iter(words[1:])
    for word in options:
        if word in ("-m", "-c"):
            return next(options, program) if word == "-m" else f"{program} -c"
        if word in ("-X", "-W"):
            next(options, None)
            continue
        if not word.startswith("-"):
            return " ".join([PurePath(word).name, *[each for each in list(options)[:1] if each[:1].isalpha()]])
    return program
