"""An engine for the tests of ``benchmarks.compare``: it does no work, and fails where there are 7 prompt tokens."""

import time

from benchmarks.peers import work


def generate(prompts: list[list[int]], output_len: int) -> None:
    if len(prompts[0]) == 7:
        raise RuntimeError("7")
    time.sleep(1e-4 * output_len)


work.measure(work.options(), "0", "none", generate)
