"""A child that dies of every third seed and leaves the rest undamaged: what the campaign makes of deaths is tested with
it."""

import json
import os
import signal
import sys

if __name__ == "__main__":
    for seed in range(*map(int, sys.argv[2:5])):
        report = {"seed": seed, "subject": "none", "file": "none", "mutation": "none"}
        print(json.dumps(report), flush=True)
        if seed % 3 == 0:
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        print(json.dumps(report | {"outcome": "loaded", "detail": ""}), flush=True)
