"""``make sanitize``: the tests of the native kernels, or those named in ARGS, built with AddressSanitizer and
UndefinedBehaviorSanitizer.

The build goes to a folder of its own. Python itself is not sanitized, so the sanitizers' library is loaded before it,
and C++'s with it, whose exceptions the former has to find.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "build" / "sanitize"
TESTS = [
    "tests/kernels",
    "tests/attention",
    "tests/sample",
    "tests/worker/test_steps.py",
    "tests/models/test_replay.py",
]
# An editable installation would be found before the folder.
RUN = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, sys.argv[1])
import octavo
assert octavo.__file__.startswith(sys.argv[1]), octavo.__file__
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "--capture=sys", *sys.argv[2:]]))
"""


def main() -> int:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(TARGET)]
    subprocess.run(
        [*install, "-C", "cmake.define.OCTAVO_SANITIZE=ON", "-C", f"build-dir={TARGET}-build", str(ROOT)], check=True
    )
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        # Python keeps memory until it ends.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # For the emulator of AMX instructions, which reads and writes in their stead.
        "CXXFLAGS": "-fsanitize=address",
    }
    command = [sys.executable, "-c", RUN, str(TARGET), *(sys.argv[1:] or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
