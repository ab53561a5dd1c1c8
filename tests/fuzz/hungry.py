"""A child that finds out whether it may have more memory than the fuzzer's children."""

import json
import sys

from tests.fuzz.attempts import limit_memory

if __name__ == "__main__":
    limit_memory()
    import torch

    report = {"seed": int(sys.argv[2]), "subject": "none", "file": "none", "mutation": "none"}
    print(json.dumps(report), flush=True)
    try:
        torch.empty(2 << 30, dtype=torch.uint8)
        outcome = "failed"
    except RuntimeError:
        outcome = "loaded"
    print(json.dumps(report | {"outcome": outcome, "detail": ""}), flush=True)
