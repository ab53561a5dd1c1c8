"""The fuzzer's child process: damages a checkpoint, tries to load it and to generate a token, and says what happened.

``python -m tests.fuzz.attempts FOLDER FIRST STOP STEP``: a line of JSON before and after each seed. Has 2 GB of memory.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

_PROMPTS = ["the quick fox", "é🙂中\x00 \n"]
_MEMORY_BYTES = 2 << 30
_CPU_SECONDS = 10.0
_LONGEST_MESSAGE = 1000
# What a process loses over many loads is not what is looked for here.
_ATTEMPTS_A_PROCESS = 2000
# The GGUF library takes longer than all the rest.
_COMPARE_EVERY = 8


def limit_memory() -> None:
    """Of this process, with all that it has mapped."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(folder: Path, seeds: range) -> None:
    # Before torch and octavo are imported, and in the child alone: the tests' own process imports this file, too.
    os.environ |= {"OMP_NUM_THREADS": "1", "OCTAVO_LOG_LEVEL": "ERROR"}
    limit_memory()
    from tests.fuzz.mutations import mutate

    subjects = json.loads((folder / "subjects.json").read_text())
    with tempfile.TemporaryDirectory(dir=folder, prefix="scratch-") as scratch:
        work = Path(scratch)
        for subject in subjects:
            shutil.copytree(folder / subject["name"], work / subject["name"])
        for seed in seeds[:_ATTEMPTS_A_PROCESS]:
            draw = random.Random(seed)
            (subject,) = draw.choices(subjects, [subject["weight"] for subject in subjects])
            file = draw.choice(subject["files"])
            whole = (folder / subject["name"] / file).read_bytes()
            kind, damaged = mutate(whole, file, draw)
            report: dict[str, Any] = {"seed": seed, "subject": subject["name"], "file": file, "mutation": kind}
            print(json.dumps(report), flush=True)
            target = work / subject["name"] / file
            target.write_bytes(damaged)
            started = time.process_time()
            outcome, detail = attempt(work / subject["name"] / subject["model"], compare=seed % _COMPARE_EVERY == 0)
            seconds = time.process_time() - started
            if seconds > _CPU_SECONDS:
                outcome, detail = "failed", f"took {seconds:.0f} s, then: {outcome} {detail}"
            target.write_bytes(whole)
            print(json.dumps(report | {"outcome": outcome, "detail": detail.replace(scratch, "")}), flush=True)


def attempt(model: Path, compare: bool = False) -> tuple[str, str]:
    """("loaded" | "refused" | "failed", detail). With ``compare``, what was loaded must be what the formats' own
    libraries read."""
    from octavo import LLM, SamplingParams
    from octavo.errors import EngineDeadError, OctavoError, RequestError
    from tests.fuzz.reference import difference

    try:
        llm = LLM(str(model), max_num_seqs=1, max_num_batched_tokens=64, kv_cache_memory_bytes=1 << 20, seed=0)
        try:
            one = SamplingParams(max_tokens=1, temperature=0.0)
            for output in llm.generate(_PROMPTS, one, use_tqdm=False):
                (choice,) = output.outputs
                # Weights may have become NaN: then it is the request that fails.
                assert len(choice.token_ids) == 1 or choice.finish_reason == "error"
                assert isinstance(choice.text, str)
            with contextlib.suppress(RequestError):  # a template may fail, or there is none
                llm.chat([{"role": "user", "content": "hi"}], one, use_tqdm=False)
        finally:
            llm.shutdown()
    except EngineDeadError:
        return "failed", traceback.format_exc()
    except OctavoError as error:
        text = str(error)
        if not text.strip() or len(text) > _LONGEST_MESSAGE or len(text.splitlines()) != 1:
            return "failed", f"not one short line: {text!r:.2000}"
        return "refused", text
    except BaseException:
        return "failed", traceback.format_exc()
    found = difference(model) if compare else None
    return ("failed", found) if found else ("loaded", "")


if __name__ == "__main__":
    main(Path(sys.argv[1]), range(*map(int, sys.argv[2:5])))
