"""OpenVINO GenAI's continuous batching, from a GGUF file whose 4-bit weights it keeps."""

from importlib import metadata

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers import work


def main() -> None:
    args = work.options()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 4  # GiB
    scheduler.max_num_seqs = work.MAX_STREAMS
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU")

    def generate(prompts: list[list[int]], output_len: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_len, True, False
        tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        pipeline.generate(tensors, [config] * len(prompts))

    work.measure(args, metadata.version("openvino-genai"), "GGUF", generate)


if __name__ == "__main__":
    main()
