"""vLLM's CPU build at its best: compiled, in the process that asks, its threads bound to the cores, with the allocator
and the OpenMP library that its documentation recommends."""

import ctypes.util
import os
import sys
from importlib import metadata
from pathlib import Path

from benchmarks.peers import work


def preload() -> None:
    """Starts this program again with the two libraries preloaded; raises FileNotFoundError if one is absent."""
    if "LD_PRELOAD" in os.environ:
        return
    allocator, openmp = ctypes.util.find_library("tcmalloc_minimal"), Path(sys.prefix, "lib", "libiomp5.so")
    if allocator is None:
        raise FileNotFoundError("libtcmalloc_minimal.so (Debian: apt install libtcmalloc-minimal4)")
    if not openmp.exists():
        raise FileNotFoundError(f"{openmp} (pip install intel-openmp)")
    environment = os.environ | {"LD_PRELOAD": f"{allocator}:{openmp}"}
    command = [sys.executable, "-m", "benchmarks.peers.vllm_cpu", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)


def main() -> None:
    args = work.options()
    preload()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        dtype="bfloat16",
        max_model_len=work.MAX_MODEL_LEN,
        max_num_seqs=work.MAX_STREAMS,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], output_len: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    work.measure(args, metadata.version("vllm-cpu"), "bf16, compiled", generate)


if __name__ == "__main__":
    main()
