"""pip install, with one question asked first: would it bring gigabytes of CUDA to a machine that has no GPU? And one
after: were the native kernels built? (Pip keeps what a build that succeeds has to say to itself.)

Run by the Makefile with the virtual environment's own Python: ``install.py PIP_ARGUMENTS…``
"""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
CUDA_PACKAGES = ("nvidia-", "cuda-", "triton")


def pip(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pip", *arguments], text=True, **options)  # type: ignore[call-overload]


def torch_requirement() -> str:
    """The line of pyproject.toml, so that the range stands in one place."""
    found = re.search(r'^\s*"(torch[^"]*)",$', PYPROJECT.read_text(), re.MULTILINE)
    if found is None:
        sys.exit("tools/install.py: pyproject.toml names no torch requirement")
    return found.group(1)


def cuda_packages_of_torch() -> list[str]:
    """Names of the CUDA packages that pip would install for torch now; [] if torch is installed already."""
    try:
        metadata.version("torch")
        return []
    except metadata.PackageNotFoundError:
        pass
    report = pip("install", "--dry-run", "--quiet", "--report", "-", torch_requirement(), stdout=subprocess.PIPE)
    if report.returncode != 0:
        sys.exit(report.returncode)
    names = [entry["metadata"]["name"].lower() for entry in json.loads(report.stdout)["install"]]
    return [name for name in names if name.startswith(CUDA_PACKAGES)]


def main() -> int:
    if not Path("/dev/nvidiactl").exists() and os.environ.get("OCTAVO_ALLOW_CUDA") != "1":
        found = cuda_packages_of_torch()
        if found:
            print(
                f"octavo: pip would install torch's CUDA build ({len(found)} packages such as {found[0]}, gigabytes) "
                "on a machine without an NVIDIA GPU. Point pip at PyTorch's CPU index (PIP_INDEX_URL or "
                "PIP_EXTRA_INDEX_URL; its address is on PyTorch's installation page, compute platform CPU), "
                "or set OCTAVO_ALLOW_CUDA=1.",
                file=sys.stderr,
            )
            return 1
    code = pip("install", *sys.argv[1:]).returncode
    # -P: what was installed, not the sources in the current folder.
    probe = [sys.executable, "-P", "-c", "import octavo._native"]
    if code == 0 and subprocess.run(probe, stderr=subprocess.DEVNULL).returncode:
        print(
            "octavo: installed WITHOUT its native kernels: they could not be built (is there a C++17 compiler?). It "
            "will compute with torch, several times slower. `pip install -v` shows why.",
            file=sys.stderr,
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
