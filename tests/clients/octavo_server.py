"""`octavo serve` on the demo model as a process, for clients that know only its address."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

__all__ = ["KEY", "LIMITED_KEY", "MODEL", "OCTAVO", "OctavoServer", "run_octavo_side", "wait_until"]

MODEL = "smollm2"
KEY = "octavo-test-key"
LIMITED_KEY = "octavo-test-key-for-one-request-at-a-time"
FOLDER = Path(__file__).resolve().parent
REPO = FOLDER.parent.parent
OCTAVO = Path(os.environ.get("OCTAVO", REPO / ".venv/bin/octavo"))
START_SECONDS = 120.0
KEYS = [
    {"name": "tests", "key": KEY},
    {"name": "limited", "key": LIMITED_KEY, "max_concurrent_requests": 1},
]


def wait_until(condition: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class OctavoServer:
    """A server process; it has not loaded its model yet.

    Args:
        words: flags.
        open_to_all: it asks for no key.

    Attributes:
        url: where it listens, without a path.
        process: the process.
    """

    def __init__(self, *words: str, open_to_all: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-")
        self._log = Path(self._folder.name) / "log"
        command = [OCTAVO, "serve", MODEL, "--port", "0", *words]
        if not open_to_all:
            keys = Path(self._folder.name) / "keys.yaml"
            keys.touch(mode=0o600)
            keys.write_text(json.dumps(KEYS))
            command += ["--api-key-file", keys]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)
        found = re.compile(r"will serve on (http\S+)$", re.MULTILINE)
        assert wait_until(lambda: found.search(self.log()) or self.process.poll() is not None, START_SECONDS)
        match = found.search(self.log())
        assert match, self.log()
        self.url = match.group(1)
        headers = {"authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=60)

    def log(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> "OctavoServer":
        assert wait_until(lambda: self.http.get("/health").status_code == 200, START_SECONDS), self.log()
        return self

    def metric(self, name: str, **labels: str) -> float:
        """The value of a series; of all series with these labels together, where there are several."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            found = re.fullmatch(rf"vllm:{name}\{{(.*)\}} (\S+)", line)
            if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
                total += float(found[2])
        return total

    def check_idle(self) -> None:
        """Asserts that the server is well, and that nothing is left running."""
        assert self.http.get("/health").status_code == 200
        busy = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        assert wait_until(lambda: not sum(map(self.metric, busy)), 5), "requests are left running"

    def stop(self) -> int:
        """Ends it as a supervisor does; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()


def run_octavo_side(*words: str, given: Any = None) -> str:
    """What octavo_side.py prints, run by octavo's own Python."""
    done = subprocess.run(
        [OCTAVO.parent / "python", FOLDER / "octavo_side.py", *words],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        cwd=REPO,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
