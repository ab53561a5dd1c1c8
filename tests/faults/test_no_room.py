"""Starts that cannot be: no place for files, none for the cache, too few files to open. The last line names the cause
and what to change; nothing is left, and no weights were read."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.heartbeat import Heartbeat
from octavo.errors import ConfigError
from tests.faults.server_process import START_SECONDS, Server


def no_files() -> None:
    """In a new process: whatever it writes to a file fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


NOWHERE = "/proc/nowhere"  # cannot be made, not even by root


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"before": no_files}, ["temporary files", "TMPDIR"]),
        ({"before": few_files}, ["64", "ulimit -n"]),
        ({"env": {"OCTAVO_CACHE": NOWHERE, "HF_HUB_OFFLINE": "0"}, "model": "smollm2"}, [f"stored in {NOWHERE}"]),
    ],
    ids=["no room for files", "few open files", "no cache"],
)
def test_the_last_line_names_the_cause(start: Callable[..., Server], options: dict[str, Any], words: list[str]) -> None:
    server = start(**options)
    assert server.wait_exit(START_SECONDS) == 1
    assert server.lines[-1].startswith("octavo: error: ")
    for word in words:
        assert word in server.lines[-1]
    assert server.said("Traceback") is None
    assert server.said("octavo.loader") is None
    assert server.left_nothing()


def test_a_disk_without_room_for_the_heartbeat_is_named_and_not_found_out_by_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="no room for the heartbeat: No space left on device; set TMPDIR"):
        Heartbeat(tmp_path / "heartbeat")
