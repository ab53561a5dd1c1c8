"""``octavo bench startup``: from a new process to a model that is ready, and to its first token."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from octavo.bench.workload import summary
from octavo.errors import OctavoError

__all__ = ["measure_startup"]

_CLASS_NAME = re.compile(r"^octavo\.errors\.\w+: ")
_PROGRAM = """
import json, sys, time
start = time.monotonic()
import torch
imported = time.monotonic()
from octavo import LLM, SamplingParams
with LLM(**json.loads(sys.argv[1])) as llm:
    ready = time.monotonic()
    llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=1), use_tqdm=False)
    print(json.dumps([imported - start, ready - imported, time.monotonic() - ready]))
"""


def measure_startup(
    engine_options: dict[str, Any], *, num_iters: int, on_iteration: Callable[[], None]
) -> dict[str, Any]:
    """Milliseconds; each time in a process of its own. The first run also warms the page cache, and is not counted."""
    found = []
    for index in range(num_iters + 1):
        command = [sys.executable, "-c", _PROGRAM, json.dumps(engine_options)]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            raise OctavoError(f"the engine did not start: {_cause(process)}")
        on_iteration()
        if index:
            found.append(json.loads(process.stdout.splitlines()[-1]))
    torch_import, ready, first_token = zip(*found, strict=True)
    return {
        "model": engine_options["model"],
        "torch_import_ms": summary(list(torch_import)),
        "ready_after_torch_ms": summary(list(ready)),
        "first_token_after_ready_ms": summary(list(first_token)),
    }


def _cause(process: "subprocess.CompletedProcess[str]") -> str:
    """What its traceback ends with, without the class of octavo's own errors; or how it ended, if it said nothing."""
    lines = process.stderr.strip().splitlines()
    return _CLASS_NAME.sub("", lines[-1]) if lines else f"its process ended with {process.returncode}"
